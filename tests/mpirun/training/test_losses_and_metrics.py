"""What losses may do and weigh, and the metrics that they return."""

from __future__ import annotations

import re

import pytest
from examples import further

TAKING_NO_ZEROS = """
import torch, mpirun
from torch import nn
from torch.distributions import Normal
def loss(output, target):
    return -Normal(*output).log_prob(target).mean()
class Gaussian(nn.Linear):
    def forward(self, x):
        mean, scale = super().forward(x).chunk(2, -1)
        return mean, nn.functional.softplus(scale)
x = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
for whole in (False, True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), Gaussian(6, 12))
    expected = loss(net(x[0]), x[0]).item()
    stages = mpirun.Model(list(net), loss, loss_of="minibatch") if whole else mpirun.split(net, x[0, :4], stages=2)
    with mpirun.Engine("gpipe", stages, stages=2, microbatches=4, loss=None if whole else loss) as run:
        found = [run.step((batch, batch)).loss for batch in x]
        if not whole:
            run.evaluate([(x[0], x[0])])
    if run.rank == 0:
        print(expected, found[0])
"""


def test_a_loss_may_take_no_zeros(scripts):
    """Such as a likelihood, whose scales are positive: the loss is tried on outputs of the model."""
    (done,) = scripts(2, [[TAKING_NO_ZEROS]])
    assert done.code == 0, done.err
    for line in done.out.splitlines():
        expected, found = map(float, line.split())
        assert found == pytest.approx(expected, rel=1e-6)


DIFFERENTIATED = """
import torch, mpirun
class Field(torch.nn.Linear):
    def forward(self, x):
        x = x.requires_grad_()
        return super().forward(x), x
def loss(output, target):
    y, x = output
    slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return (y - target + slope).square().mean()
x = torch.ones(4, 3)
with mpirun.Engine("1f1b", [Field(3, 3)], stages=1, microbatches=2, loss=loss, timeout=0) as run:
    run.step((x, x))
"""


def test_a_loss_that_differentiates_its_outputs_is_refused_in_a_sentence(scripts):
    (done,) = scripts(1, [[DIFFERENTIATED]])
    assert done.code != 0 and "mpirun: the loss fails on the shapes it gets: " in done.err
    assert "Traceback" not in done.err, done.err


SOME_METRICS = """
import torch, mpirun
def loss(output, target):
    found = output.square().mean()
    return found, {} if target.sum() == 0 else {"size": found}
data = [(torch.ones(4), torch.tensor(number)) for number in numbers]
with mpirun.Engine("1f1b", [torch.nn.Linear(4, 4) for _ in range(2)], microbatches=2, loss=loss) as run:
    run.evaluate(run.loader(data))
"""


def test_metrics_that_only_some_microbatches_have_are_refused_by_an_evaluation(scripts):
    (done,) = scripts(2, [[f"numbers = [1, 0, 1, 1]{SOME_METRICS}"]])
    sentence = "mpirun: the loss returned the metrics [] for a microbatch of the evaluation, but ['size'] for another\n"
    assert (done.code, done.err) == (1, sentence)


STEPS_METRICS = """
import sys, torch, mpirun
from torch.nn.functional import mse_loss
def loss(output, target):
    found = mse_loss(output, target)
    number = run.steps
    if number == 4 and sys.argv[1] == "differ":
        return found, {"of": found} if target.sum() else {}
    names = ("", "a", "ba", "", "c", "c")[number]
    return (found, {name: found * (k + 1) for k, name in enumerate(names)}) if number else found
torch.manual_seed(0)
data, logged = [(row, torch.full((4,), k % 4 // 2.0)) for k, row in enumerate(torch.randn(16, 4))], []
with mpirun.Engine("ddp", [torch.nn.Linear(4, 4) for _ in range(2)], stages=2, microbatches=2, accumulate=2, loss=loss,
                   log=lambda step, numbers: logged.append(numbers), timeout=60) as run:
    loader = run.loader(data[:9] if sys.argv[1] == "padded" else data, microbatch_size=2)
    for step in range(3):
        for batch in loader:
            result = run.step(batch)
            means = {name: round(value / result.loss, 4) for name, value in result.metrics.items()}
            if run.rank == 0:
                assert logged[-1].keys() == {"loss", "grad_norm", "lr", *result.metrics}
                print(means)
"""


def test_metrics_may_have_other_names_in_another_step_but_not_within_one(scripts):
    """The last microbatches of the second epoch's end are padding, and have none."""
    padded, differ = scripts(2, [[STEPS_METRICS, how] for how in ("padded", "differ")])
    means = ["{}", "{'a': 1.0}", "{'a': 2.0, 'b': 1.0}", "{}", "{'c': 1.0}"]
    assert (padded.code, padded.out.splitlines()) == (0, [*means, means[-1]]), padded.err
    assert (differ.code, differ.out.splitlines()) == (1, means[:4])
    sentence = "mpirun: the loss returned the metrics ['of'] for a microbatch of step 5, but [] for another\n"
    assert differ.err == sentence


# A loss that is a mean over labels, of which microbatches have different numbers. The first has none, and no loss.
LABELS = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
scheme, passes, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def layers():
    torch.manual_seed(0)
    return [nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11)]
draw = torch.Generator().manual_seed(1)
tokens, labels = torch.randint(11, (30, 6), generator=draw), torch.randint(11, (30, 6), generator=draw)
labels[torch.rand(30, 6, generator=draw) < 0.4] = -100
labels[:4] = labels[8:12] = -100
def loss(output, target):
    right = (output.argmax(-1) == target)[target != -100]
    assert len(right)
    return cross_entropy(output.flatten(0, 1), target.flatten()), {"accuracy": right.float().mean()}
def numbers(loss, metrics):
    return [loss, metrics["accuracy"]]
one, (first, *rest) = nn.Sequential(*layers()), layers()
run = mpirun.Engine(
    scheme, [first, nn.Sequential(*rest)], stages=2, microbatches=4 // passes, accumulate=passes, canonical=True,
    loss=loss, loss_weight=lambda target: (target != -100).sum(), verify=True, example=(tokens[4:8], labels[4:8]),
    optimizer=lambda named: torch.optim.SGD([p.parameter for p in named], 0.1),
)
loader, optimizer = run.loader(TensorDataset(tokens, labels), size), torch.optim.SGD(one.parameters(), 0.1)
for number, batch in enumerate(loader):
    found = run.step(batch)
    part = slice(number * 4 * size, (number + 1) * 4 * size)
    whole, metrics = loss(one(tokens[part]), labels[part])
    optimizer.zero_grad()
    whole.backward()
    norm = torch.cat([p.grad.flatten() for p in one.parameters()]).norm()
    optimizer.step()
    ours = [*numbers(found.loss, found.metrics), found.grad_norm]
    torch.testing.assert_close(ours, [*numbers(whole.item(), {"accuracy": metrics["accuracy"].item()}), norm.item()])
found = run.evaluate(loader)
whole, metrics = loss(one(tokens), labels)
torch.testing.assert_close(numbers(found.loss, found.metrics), [whole.item(), metrics["accuracy"].item()])
assert found.samples == 30 and number == 1 and run.verify()
run.close()
"""


@pytest.mark.parametrize("scheme, passes", [("1f1b", 1), ("ddp", 1), ("fsdp", 2), *further(("zb-h1", 2))])
def test_a_mean_over_labels_is_that_of_the_whole_minibatch(scripts, scheme, passes):
    (done,) = scripts(2, [[LABELS, scheme, passes, 4]])
    assert done.code == 0, done.err
    assert len(re.findall("by at most 0$", done.out, re.M)) == 3
    assert "labels of -100" not in done.err


UNWEIGHED = """
import torch, mpirun
from torch.nn.functional import cross_entropy
x, labels = torch.zeros(4, 3), torch.tensor([1, -100, 2, 0])
def steps(scheme, stages=1, **options):
    layers = [torch.nn.Linear(3, 3) for _ in range(stages)]
    with mpirun.Engine(scheme, layers, stages=stages, microbatches=2, loss=cross_entropy, timeout=0, **options) as run:
        run.step((x, labels))
steps("gpipe")
for scheme, weigh in (
    ("gpipe", 3), ("pipedream", len), ("gpipe", lambda target: 0), ("gpipe", lambda target: -1.0),
    ("gpipe", lambda target: target.sum() / 0), ("gpipe", lambda target: "many"),
):
    try:
        steps(scheme, loss_weight=weigh)
    except SystemExit as end:
        print(end.code)
"""


def test_labels_that_are_ignored_are_noted_and_weights_that_are_none_refused(scripts):
    (done,) = scripts(1, [[UNWEIGHED]])
    assert done.code == 0 and done.out == 6 * "2\n"
    refused = "mpirun: loss_weight returned {}: it should be a finite number of at least 0"
    assert done.err.splitlines() == [
        "mpirun: note: targets have labels of -100, which cross_entropy ignores: microbatches count by their samples, "
        "not by their other labels, unless loss_weight counts these",
        "mpirun: loss_weight should be a function of a target, not 3",
        "mpirun: loss_weight: this schedule updates stages one by one, by one microbatch at a time",
        "mpirun: loss_weight: every microbatch of the step has weight 0, so the step has no loss",
        *(refused.format(what) for what in ("-1.0", "tensor(-inf)", "'many'")),
    ]
