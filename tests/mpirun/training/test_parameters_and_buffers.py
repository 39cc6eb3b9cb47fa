"""Parameters and buffers that scripts set, freeze, tie or share, that ranks draw, and that forwards change."""

from __future__ import annotations

import pytest
from engine_scripts import PRELUDE
from examples import further


def test_values_that_a_script_gives_its_parameters_count_at_once(tmp_path, execute):
    """Written in place, for an evaluation, or for good.

    With weight versions, too, where the last STEP has left others than the next step begins with.
    """
    script = """
def trained(scheme):
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    owned = [parameter for layer in layers for parameter in layer.parameters()]
    def put(values):
        for parameter, value in zip(owned, values, strict=True):
            parameter.data.copy_(value)
    def kept():
        return [parameter.data.clone() for parameter in owned]
    def state():
        for name, value in run.state_dict().items():
            yield name, value.tolist()
    run = engine(layers, scheme, optimizer=SGD, lr=0.5)
    with run:
        for step in range(2):
            yield run.step((x, x)).loss
        before = kept()
        yield "trained", run.evaluate([(x, x)]).loss, *state()
        put([torch.full_like(value, 0.25) for value in before])
        yield "average", run.evaluate([(x, x)]).loss, *state()
        run.save(folder / scheme)
        run.export(folder / f"{scheme} export")
        put(before)
        yield "trained", run.evaluate([(x, x)]).loss, *state()
        put([torch.full_like(value, 0.5) for value in before])
        yield run.step((x, x)).loss, run.step((x, x)).loss, *state()
    if run.rank == 0:
        files = [*folder.glob(f"{scheme}*/*.safetensors"), *folder.glob(f"{scheme}/step*/weights*")]
        assert len({file.parent for file in files}) == 2, files
        assert all((value == 0.25).all() for file in files for value in load_file(file).values())
for scheme in ("gpipe", "ddp", "pipedream"):
    torch.manual_seed(0)
    written = list(trained(scheme))
    assert written[2] == written[4] != written[3]
    average = x
    for _ in range(2):
        average = (average.sum(1, keepdim=True) * 0.25 + 0.25).expand(8, 4)
    torch.testing.assert_close(torch.tensor(written[3][1]), mse_loss(average, x))
"""
    execute(2, script, tmp_path)


def test_modules_that_share_a_parameter_train_it_as_one(execute):
    """Given as a list, as children of a Sequential, one of which may come twice, or tied by only some of its names."""
    script = """
class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = self.again = weight
    def forward(self, x):
        return x @ self.weight.T
def modules():
    torch.manual_seed(0)
    embedding, twice = nn.Embedding(5, 4), nn.Linear(4, 4)
    return [embedding, twice, twice, Head(embedding.weight)]
x, y = torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0)).unbind()
whole = nn.Sequential(*modules())
optimizer, plain = SGD(whole.parameters(), 0.5), []
for step in range(3):
    loss = nn.functional.cross_entropy(whole(x[step]), y[step])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plain.append(loss.item())
plain.append(nn.functional.cross_entropy(whole(x[2]), y[2]).item())
tied = mpirun.Model(modules(), nn.functional.cross_entropy, tied=[[(0, "weight"), (3, "weight")]])
for model in (modules(), nn.Sequential(*modules()), tied):
    with engine(model, "1f1b", loss=cross_entropy, optimizer=SGD, lr=0.5) as run:
        losses = [run.step((x[step], y[step])).loss for step in range(3)]
        losses.append(run.evaluate(run.loader(TensorDataset(x[2], y[2]), microbatch_size=1)).loss)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)
"""
    execute(2, script)


TIES = """
def linear(frozen=()):
    layer = nn.Linear(4, 4)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    return layer
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(self.a(x))
def frozen(first, second):
    stages = [{"l": lambda: linear(first), "own": linear}, {"m": lambda: linear(second)}]
    return stages, [[(0, f"l.{name}"), (1, f"m.{name}")] for name in ("weight", "bias")]
def twice(*names):
    return [{"l": linear}, {"t": Two}], [[(0, "l.weight"), *((1, name) for name in names)]]
stages, tied = eval(sys.argv[1])
with engine(mpirun.Model(stages, mse_loss, tied=tied), loss=None, stages=2, verify=True, canonical=True) as run:
    for _ in range(2):
        loss = run.step((x, x)).loss
    if run.rank == 0:
        print(loss)
    assert run.verify()
"""


def test_a_tie_may_name_parameters_in_any_order_which_are_trained_or_frozen_in_all_its_stages(scripts):
    orders = ("'t.a.weight', 't.b.weight'", "'t.b.weight', 't.a.weight'")
    frozen = ("['bias'], ['bias']", "['weight', 'bias'], ['weight', 'bias']", "['weight'], []", "[], ['bias']")
    runs = [*(f"twice({names})" for names in orders), *(f"frozen({names})" for names in frozen)]
    one, other, *sound, first, second = scripts(2, [[TIES, run] for run in runs])
    assert [run.code for run in (one, other, *sound)] == [0] * 4 and one.out == other.out, one.err + other.err
    tie = "mpirun: the model ties l.{0} of stage 0, {3}, {1}, to m.{0} of stage 1, {3}, {2}\n"
    assert (first.code, first.err) == (2, tie.format("weight", "frozen", "trained", "torch.float32 of shape (4, 4)"))
    assert (second.code, second.err) == (2, tie.format("bias", "trained", "frozen", "torch.float32 of shape (4,)"))


@pytest.mark.parametrize(
    ("scheme", "drawn", "what"),
    [
        ("ddp", "all", "parameters"),
        ("ddp", "scale", "frozen parameters or buffers"),
        ("ddp", "order", "frozen parameters or buffers"),
        ("fsdp", "scale", "frozen parameters or buffers"),
        ("fsdp", "all", None),
        ("gpipe", "all", None),
        ("1f1b", "all", "weight"),
    ],
)
def test_ranks_that_draw_different_weights_are_told_so(scheme, drawn, what, execute):
    """Those of stages that several ranks hold."""
    script = """
_, scheme, drawn = sys.argv
def stage(weight=None):
    module = torch.nn.Linear(4, 4)
    module.weight = module.weight if weight is None else weight
    module.register_buffer("scale", torch.arange(5.0))
    return module
torch.manual_seed(rank if drawn == "all" else 0)
first = stage()
modules = [first, stage(first.weight if scheme == "1f1b" else None)]
if drawn == "scale":
    modules[0].scale[4] = rank
if drawn == "order":
    modules[0].scale[:4] = modules[0].scale[:4].roll(2 * rank)
with engine(modules, scheme) as run:
    run.step((torch.ones(2, 4), torch.ones(2, 4)))
"""
    sentence = (
        f"mpirun: ranks 0 and 1 begin with different values of stage 0, {what}: the code that makes them should draw "
        "the same numbers on every rank, as after torch.manual_seed with the same number of threads; modules that an "
        "earlier Engine has trained have their values on its owners' ranks: save and resume"
    )
    execute(2, script, scheme, drawn, code=2 if what else 0, err=[sentence] if what else [])


STATE = """
torch.manual_seed(0)
class Stateful(nn.Linear):
    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how
        self.register_buffer("h", torch.zeros(4))
    def forward(self, x):
        y = super().forward(x) * self.h.clone() if self.how == "clone" else super().forward(x) * self.h
        self.h.add_(y.detach().mean(0))
        return y
def run(model, count=2):
    with engine(model, "1f1b", stages=2, example=(x[: 8 // count], x[: 8 // count]), microbatches=count) as run:
        run.step((x, x))
"""


def test_buffers_that_go_from_microbatch_to_microbatch_are_named(execute):
    """And, where ranks have their own, the one whose values evaluations use."""
    script = """
run([nn.Linear(4, 4), Stateful("clone")])
run([nn.Linear(4, 4), Stateful("clone")], 1)
with engine([nn.Linear(4, 4), Stateful("clone")], "ddp") as run:
    run.step((x, x))
"""
    goes = (
        "mpirun: note: forwards change buffers from microbatch to microbatch, as BatchNorm does: h of stage 1: outputs "
        "may differ from the whole batch at once"
    )
    execute(2, STATE + script, err=[goes, f"{goes}; evaluation uses those of rank 0"])


@pytest.mark.parametrize("ranks", [*further(1), 2])
def test_a_tensor_of_the_trial_that_a_forward_has_cached_is_refused(ranks, launch):
    """It has no values: a message that it is computed into would keep what its memory had before."""
    script = """
torch.manual_seed(0)
from functools import lru_cache
@lru_cache
def scale(size):
    return torch.arange(1.0, size + 1)
class Cached(nn.Linear):
    def forward(self, x):
        return x * 1, super().forward(x) * scale(4)
class Last(nn.Linear):
    def forward(self, x, y):
        return super().forward(x + y)
with engine([Cached(4, 4), Last(4, 4)], "gpipe" if MPI.COMM_WORLD.size == 2 else "ddp", example=(x[:4], x[:4])) as run:
    run.step((x, x))
"""
    done = launch(ranks, program=("-c", PRELUDE + script))
    assert done.code == 1
    assert "step 1: line" in done.err or ranks == 1
    assert "outside of its module, for example in a cache: keep it in the module, as a buffer" in done.err


def test_labels_that_are_ignored_are_told_where_microbatches_then_count_otherwise_than_in_one_batch(execute):
    script = """
target = torch.tensor([0, 1, 2, 3, 0, -100, -100, 3])
def train(**options):
    with engine([nn.Linear(4, 4)], "ddp", loss=cross_entropy, **options) as run:
        run.step((x, target))
        run.step((x, target))
        return run.step((x, target.clamp(min=0))).loss
train()
train(loss_weight=lambda target: (target != -100).sum())
"""
    ignored = "mpirun: note: targets have labels of -100, which cross_entropy ignores: microbatches count by their "
    execute(2, script, err=[f"{ignored}samples, not by their other labels, unless loss_weight counts these"])
