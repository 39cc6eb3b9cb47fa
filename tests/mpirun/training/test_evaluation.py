"""Evaluations and predictions between the steps of a script: what they compute, and what they leave alone."""

from __future__ import annotations


def test_evaluations_leave_the_buffers_alone_with_which_other_ranks_train(tmp_path, execute):
    """Each rank has its own mean of the microbatches that it has seen; those of rank 0 are the model's."""
    script = """
class Centred(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return super().forward(x - self.mean)
def losses(evaluates):
    torch.manual_seed(0)
    with engine([Centred()], "ddp", microbatches=4) as run:
        for number in range(3):
            yield run.step((x + number, x)).loss
            if evaluates:
                run.evaluate([(x, x)])
                run.predict([(x, x)])
                run.export(folder / str(number))
assert list(losses(True)) == list(losses(False))
"""
    execute(2, script, tmp_path)


def test_evaluations_are_in_eval_mode_whatever_it_leaves_out(execute):
    """A stage that is only a dropout returns its input; running statistics are used, and stay."""
    script = """
x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, torch.zeros(64, 32))
for cut in (list, lambda net: mpirun.split(net, x[:4], stages=4)):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.BatchNorm1d(32))
    model = cut(copy.deepcopy(net))
    with engine(model, "1f1b", stages=4, microbatches=8) as run:
        loader = run.loader(data, microbatch_size=4)
        expected = copy.deepcopy(net).eval()(x)
        for trained in (False, True):
            found, predicted = run.evaluate(loader), run.predict(loader)
            if run.rank == 0 and not trained:
                torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found.loss, expected.square().mean().item(), rtol=1e-5, atol=0)
            for batch in loader:
                run.step(batch)
        before = run.evaluate(loader).loss
        assert before == run.evaluate(loader).loss
"""
    execute(2, script)


def test_modules_with_a_train_of_their_own_are_told_when_an_evaluation_ends(execute):
    """As layers that add an adapter to their weight in eval mode; one that was in eval mode before stays in it."""
    script = """
from torch.nn.functional import linear, mse_loss
class Adapted(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.added = nn.Parameter(torch.randn(4, 4))
        self.merged = False
        self.weight.requires_grad_(False)
    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.added.data
            self.merged = not mode
        return super().train(mode)
    def forward(self, x):
        return super().forward(x) + (0 if self.merged else linear(x, self.added))
def losses(evaluates):
    torch.manual_seed(0)
    x, net = torch.randn(4, 4), nn.Sequential(Adapted(), Adapted(), nn.Dropout())
    net[2].eval()
    with engine([net]) as run:
        for _ in range(3):
            yield run.step((x, x)).loss
            if evaluates:
                run.evaluate([(x, x)])
torch.testing.assert_close(list(losses(True)), list(losses(False)))
"""
    execute(1, script)


def test_losses_and_predictions_are_of_the_module_s_own_output_whoever_makes_the_model(execute):
    script = """
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        between = self.first(x)
        return {"out": self.second(between), "between": between}
def loss(output, target):
    return mse_loss(output["out"], target)
torch.manual_seed(0)
x, net = torch.randn(8, 4), Two()
cut = mpirun.split(net, x[:4], stages=2)
for model, own in ((cut.model(loss), None), (cut.model(lambda output, _: output["between"].sum()), loss)):
    with engine(model, "1f1b", loss=own) as run:
        found, scored = run.predict([(x, x)]), run.evaluate([(x, x)]).loss
        if run.rank == 0:
            print({name: value.allclose(net(x)[name]) for name, value in found.items()}, end=" ")
            print(abs(scored - loss(net(x), x)).item() < 1e-5)
"""
    execute(2, script, out=["{'out': True, 'between': True} True"] * 2)


def test_an_evaluation_in_the_middle_of_an_epoch_is_over_all_of_it(execute):
    """A prediction after a step needs no targets."""
    script = """
with engine(example=None) as run:
    loader = run.loader(rows[:5], shuffle=True)
    for batch in loader:
        run.step(batch)
        print(loader.epoch, loader.step, run.evaluate(loader).samples, run.evaluate(loader, 2).samples)
    print(len(run.predict(loader)), run.steps, run.predict([(x[:2], None)]).equal(run.predict([(x[:2], x[:2])])))
"""
    execute(1, script, out=["0 1 5 4", "0 2 5 4", "1 0 5 4", "5 3 True"], err=[])


def test_a_smaller_last_batch_of_a_torch_loader_is_padded(execute):
    """Its samples alone count, whether its microbatches are whole or not, or it is the only batch."""
    script = """
from torch.utils.data import DataLoader
x = torch.randn(23, 4, generator=torch.Generator().manual_seed(0))
names = [f"row {k}" for k in range(23)]
def loss(output, target):
    found = mse_loss(output, target["y"])
    return found, {"last": torch.tensor([float(name.split()[1]) for name in target["name"]]).mean()}
for scheme in ("1f1b", "ddp"):
    net = nn.Sequential(*layers(2))
    expected = mse_loss(net(x), x).item()
    with engine(list(net), scheme, loss=loss) as run:
        for size in (10, 6, 64):
            data = DataLoader([(row, {"y": row, "name": name}) for row, name in zip(x, names)], size)
            found, outputs = run.evaluate(data), run.predict(data)
            assert found.samples == 23 and abs(found.loss - expected) < 1e-6 and found.metrics["last"] == 11
            assert outputs is None if rank else outputs.allclose(net(x), atol=1e-6)
    print("same")
with engine(2) as run:
    print(refused(run.step, (x[:7], x[:7])))
"""
    execute(2, script, out=["same", "same", "2"] * 2)


def test_a_log_has_evaluations_and_how_fast_steps_are(execute):
    """And the share of the peak that is used: 6 operations for each of 40 parameters and 32 tokens."""
    script = """
def loss(output, target):
    return mse_loss(output, target), {"a": output.sum()}
logged = []
log = lambda step, numbers: logged.append((step, numbers))
with engine(2, "1f1b", loss=loss, log=log) as run:
    seconds = run.step((x, x)).seconds
    found = run.evaluate([(x, x)])
assert bool(logged) == (rank == 0)
for (step, numbers), (at, evaluated) in zip(logged[::2], logged[1::2], strict=True):
    assert step == at == 1 and evaluated == {"eval/loss": found.loss, "eval/a": found.metrics["a"]}
    assert numbers["samples_per_second"] == 8 / seconds and numbers["tokens_per_second"] == 32 / seconds
    assert numbers["peak_bytes"] > 2**20
"""
    execute(2, script, err=[])
