"""Scripts go on from checkpoints: what is restored of optimizers and the data's order, and which options may change."""

from __future__ import annotations


def test_what_a_microbatch_looks_like_is_enough_to_begin(tmp_path, execute):
    """An example on every rank, whose values do not count; or a loader; or nothing, for a Model with a batch."""
    script = """
from mpirun.examples.mlp import tiny
def begins(run):
    found = len(run.state_dict()), run.steps, run.resume(folder / "none")
    run.export(folder / str(len([*folder.iterdir()])))
    return found
with engine(2, example=(torch.full((4, 4), float("nan")), x[:4])) as run:
    print(begins(run), run.evaluate([(x, x)]).samples, run.save(folder / "saved"))
with engine(2, example=None) as run:
    print(refused(run.state_dict))
    run.loader(rows, 4)
    print(begins(run), refused(run.step))
with engine(tiny, loss=None, stages=2) as run:
    print(begins(run)[1:], run.step().loss > 0, refused(run.step, (x, x)))
"""
    said = execute(1, script, tmp_path).out.splitlines()
    assert said[-3:] == ["2", "(4, 0, False) 2", "(0, False) True 2"]


def test_a_run_of_the_command_line_goes_on_in_a_script(several, execute, compiled, text, tmp_path):
    """With the same optimizer; a script does not know the text."""
    script = """
from mpirun.examples.mlp import tiny
model = tiny(1)
text = torch.frombuffer(bytearray(open(sys.argv[3], "rb").read()), dtype=torch.uint8)
with mpirun.Engine(sys.argv[1], model) as run:
    batches = [model.batch(text, np.random.default_rng([0, *divmod(k, 2)])) for k in range(6)]
    loader = run.loader(batches, collate=lambda items: items[0])
    assert run.resume(sys.argv[2])
    print(run.step(next(iter(loader))).loss, run.steps)
"""
    schedule = compiled("1f1b", stages=1, microbatches=2)
    options = ["--model", "mpirun.examples.mlp:tiny", "--text", text, "--steps", 2, "--save", tmp_path]
    ((code, out),) = several(1, [[schedule, *options]])
    assert code == 0, out
    done = execute(1, script, schedule, tmp_path, text)
    assert done.out.split()[-1] == "3", done.err


def test_a_run_whose_steps_are_all_done_is_exported_and_saved_when_it_is_started_again(tmp_path, execute):
    """As one that was killed before its export. A stream is not read ahead, so the script gives an example."""
    script = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows)
def weights(name):
    files = (folder / name).glob("*.safetensors")
    return {key: value.tolist() for file in files for key, value in load_file(file).items()}
for kind, dataset in (("map", rows), ("stream", Stream())):
    losses = []
    for part in ("whole", "exported", "saved"):
        with engine(2, example=(x[:2], x[:2]) if kind == "stream" else None) as run:
            loader = run.loader(dataset, 2)
            assert run.resume(folder / kind, data=loader) == (part != "whole")
            batches = iter(loader)
            if not run.steps:
                run.step(next(batches))
                run.save(folder / kind, data=loader)
            if part == "saved":
                assert run.save(folder / kind, data=loader)
            else:
                run.export(folder / f"{kind}-{part}")
            assert (run.steps, loader.epoch, loader.step) == (1, 0, 1)
            losses.append(run.step(next(batches)).loss)
    assert len({*losses}) == 1 and weights(f"{kind}-whole") == weights(f"{kind}-exported") != {}
"""
    execute(2, script, tmp_path)


# Trains so many steps from where a folder's checkpoints end, and saves.
GOES_ON = """
def goes_on(name, steps, model=1, *given, **options):
    with engine(model, *given, **options) as run:
        run.resume(folder / name)
        while run.steps < steps:
            run.step((x, x))
        run.save(folder / name)
        of_units = run.session.interpreter.optimizer.by_unit.values()
        made = [each for unit in of_units for each in unit.optimizers]
        kept = [x for each in made for state in each.state.values() for x in state.values()]
        return [run.predict([(x, x)]), *kept]
"""


def test_what_an_optimizer_keeps_is_resumed_as_it_was_saved(tmp_path, compiled, execute):
    """Python numbers, tensors of other shapes and types than the parameter's; what a scheduler sets in groups.

    And what is kept for a parameter without dimensions, where weights are divided.
    """
    script = """
class Odd(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad.double()
            if not state:
                state.update(decay=1.0, calls=0, begun=False, scale=torch.ones(()).double(), rows=torch.zeros(4, 1, 1))
            state.update(decay=state["decay"] * 0.9, calls=state["calls"] + 1, begun=True)
            state["scale"] *= 0.9
            state["rows"] += gradient.reshape(4, 1, -1).mean(2, keepdim=True)
            parameter -= state["decay"] * gradient + state["scale"] * state["rows"].sum() / state["calls"]
class Decay(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return self.base_lrs
class Scaled(nn.Linear):
    def __init__(self, *size):
        super().__init__(*size)
        self.scale = nn.Parameter(torch.tensor(1.5))
    def forward(self, x):
        return super().forward(x) * self.scale
def momentum(named):
    return SGD([x.parameter for x in named], 0.1, momentum=0.9)
def scaled():
    torch.manual_seed(0)
    return [Scaled(4, 4), Scaled(4, 4)]
def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
for number, (make, options) in enumerate((
    (lambda: 2, {"optimizer": torch.optim.Adafactor}), (lambda: 2, {"optimizer": Odd}),
    (lambda: 2, {"optimizer": torch.optim.AdamW, "scheduler": Decay}),
    (scaled, {"scheme": sys.argv[2], "optimizer": momentum, "example": (x[:4], x[:4])}),
)):
    one = goes_on(f"{number} at once", 4, make(), **options)
    goes_on(f"{number} in parts", 2, make(), **options)
    other = goes_on(f"{number} in parts", 4, make(), **options)
    assert len(one) == len(other) and all(map(same, one, other)), (one, other)
"""
    schedule = compiled("fsdp", stages=2, microbatches=2, workers=2, shards=2)
    done = execute(2, GOES_ON + script, tmp_path, schedule, err=[])
    assert done.out.count("resumed after step 2: ") == 4


def test_several_optimizers_that_leave_something_out_are_resumed_under_another_cut(tmp_path, execute):
    """The matrices have one, biases another; the first bias none, and it stays, and counts in no norm."""
    script = """
def some(named):
    matrices = [x.parameter for x in named if x.name.endswith("weight")]
    biases = [x.parameter for x in named if x.name.endswith("bias") and x.name != "0.bias"]
    return [torch.optim.Muon(matrices, 0.1), *([SGD(biases, 0.1, momentum=0.9)] if biases else [])]
def plain(steps):
    net = nn.Sequential(*layers(2))
    net[0].bias.requires_grad_(False)
    made = [torch.optim.Muon([net[0].weight, net[1].weight], 0.1), SGD([net[1].bias], 0.1, momentum=0.9)]
    for _ in range(steps):
        loss = mse_loss(net(x), x)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for each in made:
            each.step()
            each.zero_grad()
    return loss.item(), norm.item(), net.state_dict()
def goes_on(stages, steps):
    net = nn.Sequential(*layers(2))
    cut = mpirun.split(net, x[:4], stages=stages)
    options = {"optimizer": some, "clip": 0.1, "verify": not steps, "example": (x[:4], x[:4])}
    with engine(cut, "1f1b" if stages == 2 else "ddp", **options) as run:
        assert steps == 0 or run.resume(folder) == (steps > 2)
        while run.steps < (steps or 2):
            result = run.step((x, x))
        assert run.verify() if steps == 0 else run.save(folder)
        if steps == 4:
            run.print("optimizers", json.load(open(folder / "step-00000004" / "manifest.json"))["optimizer"])
            loss, norm, weights = plain(4)
            found = result.loss, result.grad_norm, run.state_dict()
            torch.testing.assert_close(found, (loss, norm, {} if rank else dict(weights)))
goes_on(2, 0)
goes_on(1, 2)
goes_on(2, 4)
"""
    done = execute(2, script, tmp_path)
    assert "optimizers torch.optim.Muon and torch.optim.sgd.SGD" in done.out.splitlines()
    note = "mpirun: note: the optimizer leaves out 0.bias: this Engine does not train them"
    assert done.err.splitlines() == [note] * 3


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path, execute):
    what = "no stage has 2 of its entries, such as stage1.bias: is it of a larger model?"
    script = GOES_ON + "goes_on('a', 1, 2)\ngoes_on('a', 2, 1)"
    execute(1, script, tmp_path, code=2, err=[f"mpirun: {tmp_path / 'a' / 'step-00000001'}: {what}"])


def test_an_epoch_that_sigterm_ends_in_its_last_step_is_evaluated_after_the_restart(execute, tmp_path):
    """If the script counts the epochs that it has evaluated in what `save` keeps of it."""
    script = """
def train():
    with engine(2, "1f1b") as run:
        loader = run.loader(rows, 2)
        run.resume(folder / "saved", data=loader)
        for epoch in range(run.state.get("evaluated", 0), 3):
            if loader.epoch == epoch:
                for batch in loader:
                    if run.steps == 3:
                        signal.raise_signal(signal.SIGTERM)
                    run.step(batch)
            run.evaluate(loader)
            run.print("evaluated", epoch, run.steps)
            run.save(folder / "saved", data=loader, state={"evaluated": epoch + 1})
assert refused(train) == 143
train()
"""
    done = execute(2, script, tmp_path)
    evaluated = [line for line in done.out.splitlines() if line.startswith("evaluated")]
    assert evaluated == [f"evaluated {epoch} {2 * epoch + 2}" for epoch in range(3)]
