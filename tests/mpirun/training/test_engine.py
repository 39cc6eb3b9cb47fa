"""Scripts that drive Engines on four ranks: the bits of one process, evaluation, and resuming."""

from __future__ import annotations

from examples import further
from golden_cases import EVERY

# 41 samples: an epoch has three steps of 8 microbatches, the last of which has 9 samples. Blocks differ in train and
# eval mode, and have running statistics; the metrics are such that padding would change them.
DRIVEN = """
generator = torch.Generator().manual_seed(5)
inputs, targets = (torch.randn(41, 8, generator=generator) for _ in range(2))
data = TensorDataset(inputs, targets)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)
    def forward(self, x):
        return x + self.dropout(self.norm(torch.tanh(self.linear(x))))
def modules(stages=4):
    torch.manual_seed(1)
    return [Block() for _ in range(stages)]
def loss(output, target):
    return mse_loss(output, target), {"largest": output.abs().amax(1).mean(), "samples": len(output)}
def groups(named):  # matrices decay, vectors do not
    matrices, vectors = ([p.parameter for p in named if (len(p.shape) > 1) == matrix] for matrix in (True, False))
    parts = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(parts, 1e-2, betas=(0.8, 0.95))
def driven(scheme, model=None, **options):
    options = {"loss": loss, "optimizer": groups, "canonical": True, "microbatches": 8, **options}
    return engine(modules() if model is None else model, scheme, **options)
def train(run, loader, steps):
    numbers = []
    while run.steps < steps:
        for batch in loader:
            result = run.step(batch)
            numbers.append((result.loss, result.grad_norm, dict(result.metrics), result.lr, result.tokens))
            if run.steps == steps:
                break
    return numbers
def verified(run):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run.verify()
    differ = re.findall(r"^verify: (\\w+) differ from one process by at most 0$", out.getvalue(), re.M)
    assert rank or differ == ["losses", "gradients", "parameters", "buffers"], out.getvalue()
"""
ALSO = ", ".join(further('("zb-h1", {})', '("ddp", {})'))


def test_a_schedule_is_a_file_a_program_a_scheme_or_one_s_own(execute, traces, tmp_path):
    script = """
import schedgen
(folder / "mine.py").write_text("mode = 'strict'\\ndef w(s, b, d):\\n    return s, s\\n"
                                "def n(s, b, d):\\n    return 100 * d + b\\n")
sizes = schedgen.Sizes(4, 8, 4, groups=2)
found = []
for schedule, more in ((sys.argv[2], {}), (schedgen.compile(schedgen.load("lpp", sizes), sizes), {}),
                       ("gpipe", {"stages": 4, "microbatches": 8}),
                       (str(folder / "mine.py"), {"stages": 4, "microbatches": 8})):
    with driven(schedule, threads=2, **{"microbatches": None, **more}) as run:
        found.append((train(run, run.loader(data, 2), 1), torch.get_num_threads()))
assert found[0][1] == 2 and all(each == found[0] for each in found), found
"""
    execute(4, DRIVEN + script, tmp_path, traces / "1f1b.json")


def test_every_scheme_gives_the_bits_of_one_process_and_evaluations_are_in_eval_mode(execute):
    """Rates, tokens and metrics are those worked out by hand. Data-parallel ranks have other statistics."""
    script = f"""
rates = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
first = None
for scheme, options in (("1f1b", {{}}), ("fsdp", {{"shards": 4}}), {ALSO}):
    with driven(scheme, verify=True, clip=0.5, scheduler=rates, **options) as run:
        loader, test = run.loader(data, 2, shuffle=True, seed=3), run.loader(data, 2)
        numbers = train(run, loader, 2 * len(loader))
        found, predicted = run.evaluate(test), run.predict(test)
        assert found.samples == 41 and run.evaluate(test, batches=1).samples == 16
        again = run.predict(test)
        verified(run)
    if rank == 0:
        assert len(predicted) == 41 and predicted.equal(again)
        assert math.isclose(found.loss, mse_loss(predicted, targets).item(), rel_tol=1e-5)
        assert math.isclose(found.metrics["largest"], predicted.abs().amax(1).mean().item(), rel_tol=1e-5)
    first = first or (numbers, found, predicted)
    assert numbers == first[0]
    if scheme not in ("ddp", "fsdp"):
        assert found == first[1] and (rank or predicted.equal(first[2]))
losses, norms, metrics, lrs, tokens = zip(*numbers)
assert tokens == (128, 128, 72) * 2 and lrs == (1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3)
# The last step has four microbatches of two samples, and one of one.
assert metrics[0]["samples"] == 2 and math.isclose(metrics[2]["samples"], (4 * 2 * 2 + 1) / 9)
"""
    execute(4, DRIVEN + script)


def test_buffers_that_forwards_change_are_changed_once_verified_saved_resumed_and_exported(execute, tmp_path):
    """4 steps of 8 microbatches, of which a data-parallel rank has 2; the other schedule recomputes all forwards."""
    script = """
def normed():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in "1234"))
data = TensorDataset(inputs[:32], targets[:32])
for scheme, options, microbatches in (("1f1b", {"recompute": "all"}, 8), ("ddp", {}, 2)):
    exported = []
    for resumes in (False, True)[: 2 if scheme == "1f1b" else 1]:
        model = mpirun.split(normed(), inputs[:2], stages=4) if scheme == "1f1b" else list(normed())
        with driven(scheme, model, verify=not resumes, **options) as run:
            loader = run.loader(data, 2)
            if resumes:
                run.resume(folder / scheme, data=loader)
            else:
                train(run, loader, 2)
                run.save(folder / scheme, data=loader)
            train(run, loader, 4)
            run.export(folder / f"{scheme} {resumes}")
            resumes or verified(run)
        files = (folder / f"{scheme} {resumes}").glob("*.safetensors")
        exported.append({name: x.tolist() for file in files for name, x in load_file(file).items()})
    counts = [value for name, value in exported[0].items() if name.endswith("num_batches_tracked")]
    assert counts == [4 * microbatches] * 4 and exported[-1] == exported[0], exported
"""
    execute(4, DRIVEN + script, tmp_path)


def test_predictions_under_every_scheme_have_the_bits_of_one_process(execute, traces):
    some = ("fslpp", "zb-v", "chimera", "1f1b-rr", "pipedream")
    names = [*some, *further(*(name for name in EVERY if name not in (*some, "1f1b-tied", "1f1b-tensor")))]
    script = """
for file in sys.argv[1:]:
    stages = json.loads(Path(file).read_text())["scheme"]["stages"]
    with driven(file, modules(stages), microbatches=None) as run:
        predicted = run.predict(run.loader(TensorDataset(inputs[:16], targets[:16]), 2))
    plain = nn.Sequential(*modules(stages)).eval()
    with torch.no_grad():
        assert rank or predicted.equal(torch.cat([plain(part) for part in inputs[:16].split(2)])), file
"""
    execute(4, DRIVEN + script, *(traces / f"{name}.json" for name in names))


def test_a_run_resumed_in_the_middle_of_an_epoch_under_another_scheme_gives_the_same_bits(execute, tmp_path):
    script = """
def weights(run):  # by unit, whoever owns it
    stages = run.session.interpreter.optimizer.stages.values()
    own = {(stage.index, shard): part.tolist() for stage in stages for shard, part in stage.owned.items()}
    return {unit: part for of_rank in run.comm.allgather(own) for unit, part in of_rank.items()}
def trained(name, *parts):
    numbers = []
    for scheme, steps in parts:
        with driven(scheme) as run:
            loader = run.loader(data, 2, shuffle=True)
            assert run.resume(folder / name, data=loader) == bool(numbers)
            numbers += train(run, loader, steps)
            run.save(folder / name, data=loader)
            end = weights(run)
    return numbers, end
whole, resumed = trained("whole", ("1f1b", 7)), trained("parts", ("1f1b", 4), ("zb-h1", 7))
assert whole == resumed and len(whole[0]) == 7 and len(whole[1]) == 4
"""
    execute(4, DRIVEN + script, tmp_path)
