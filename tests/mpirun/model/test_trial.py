"""What is found out about stages before the first step: outputs that are views, what forwards change and draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mpirun.data.microbatches import Microbatch, Microbatches
from mpirun.model.contract import Model
from mpirun.model.loss import loss_and_metrics, why_uncut
from mpirun.model.stage_shape import StageShape
from mpirun.model.trial import Trial
from schedgen.util.errors import UsageError

ROWS = torch.linspace(-1, 1, 24).view(4, 6)


def shapes_of(*stages: object, loss: Callable[[Tensor, Tensor], Tensor] = mse_loss) -> list[StageShape]:
    """The shapes of a chain of stages."""
    model = Model(stages, loss, lambda text, rng: (ROWS, ROWS))
    reads = model.resolved_reads([(), *((s,) for s in range(len(stages) - 1))], 1)
    return Trial(model, reads, Microbatches(model.batch, torch.zeros(1), 0, 1)(0, 0)).shapes()


class First(nn.Module):
    """Takes the first of several tensors."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x


class Views(nn.Module):
    """Returns a new tensor, then views of a parameter, of a buffer and of its input."""

    def __init__(self, constructor_asks: bool = False, forward_asks: bool = False) -> None:
        super().__init__()
        self.linear, self.forward_asks = nn.Linear(6, 6), forward_asks
        self.register_buffer("rows", torch.ones(4, 6))
        assert not constructor_asks or self.rows.sum().item()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        assert not self.forward_asks or x.sum().item() is not None
        return self.linear(x), self.linear.weight[1:], self.rows[0], x.view(-1)


@pytest.mark.parametrize("asks", [(), (True,), (False, True)], ids=["never", "constructor", "forward"])
@pytest.mark.parametrize("make", [Views, lambda *asks: lambda: Views(*asks)], ids=["module", "function"])
def test_outputs_that_are_views_are_found(make, asks):
    assert shapes_of(make(*asks), First())[0].aliased_outputs == (1, 2, 3)


class Statistics(nn.Module):
    """Its forward leaves the buffer `mean` alone, or changes it in some way."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.register_buffer("square", torch.arange(36.0).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.variance
        self.change(self, x.detach().mean(0), x)
        return x


def replaced(module: nn.Module, new: Tensor, x: Tensor) -> None:
    """Assigned as an attribute."""
    module.mean = new


def viewed(module: nn.Module, new: Tensor, x: Tensor) -> None:
    """A view of itself, that has its numbers in another order."""
    module.square = module.square.t()


def with_other_data(module: nn.Module, new: Tensor, x: Tensor) -> None:
    """The same tensor, with other memory."""
    module.mean.data = new


CHANGES = {
    "in place": lambda module, new, x: module.mean.add_(new),
    "data": lambda module, new, x: module.mean.data.mul_(0.9).add_(new),
    "view": lambda module, new, x: module.mean[1:].copy_(new[1:]),
    "out": lambda module, new, x: torch.add(module.mean, new, out=module.mean),
    "foreach": lambda module, new, x: torch._foreach_add_([module.variance, module.mean], [new, new]),
    "batch norm": lambda module, new, x: nn.functional.batch_norm(x, module.mean, module.variance, training=True),
    "instance norm": lambda module, new, x: nn.functional.instance_norm(x[None], module.mean[:4], module.variance[:4]),
    "replaced": replaced,
    "viewed": viewed,
    "other data": with_other_data,
}
NO_CHANGES = {
    "read": lambda module, new, x: x.add(module.mean),
    "batch norm": lambda module, new, x: nn.functional.batch_norm(x, module.mean, module.variance),
    "a copy": lambda module, new, x: module.mean.clone().add_(new),
}


@pytest.mark.parametrize("make", [Statistics, lambda change: lambda: Statistics(change)], ids=["module", "function"])
def test_forwards_that_change_buffers_are_found_and_no_others(make):
    for name, change in CHANGES.items():
        assert shapes_of(make(change))[0].overwrites_buffers, name
    for name, change in NO_CHANGES.items():
        assert not shapes_of(make(change))[0].overwrites_buffers, name


class Converts(nn.Linear):
    """Returns its result in another layout."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__(6, 6)
        self.convert = convert

    def forward(self, x: Tensor) -> Tensor:
        return self.convert(super().forward(x))


@pytest.mark.parametrize(
    ("convert", "kind"),
    [
        (lambda x: x.relu().to_sparse(), "sparse_coo"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "jagged"),
    ],
)
def test_an_activation_that_cannot_be_sent_is_refused(convert, kind):
    with pytest.raises(UsageError, match=f"stage 0 should return a tensor .* with a torch.{kind} in it"):
        shapes_of(Converts(convert), nn.Linear(6, 6))


class Takes(nn.Module):
    """Does something with its input."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.what(x)


TAKEN = {
    "read": lambda x: x + 1,
    "changed": lambda x: x.add_(1),
    "a view changed": lambda x: torch.cat([x[1:].add_(1), x[:1]]),
}


@pytest.mark.parametrize("how", TAKEN)
def test_a_stage_that_changes_its_inputs_is_found(how):
    shape = shapes_of(nn.Linear(6, 6), Takes(TAKEN[how]))[1]
    assert shape.overwrites_inputs == ("changed" in how)


def test_an_output_that_cannot_be_cut_is_named():
    words = "the output['one'] of a microbatch of 4 samples has shape (2,), but the last step of an epoch is padded: "
    assert (why_uncut("output", {"all": ROWS, "one": torch.zeros(2)}, 4) or "").startswith(words)
    assert why_uncut("output", torch.zeros(4, 3, 4), 4) and not why_uncut("target", torch.zeros(4, 3, 4), 4)


def test_a_metric_is_one_number_of_torch_or_python_or_is_refused_by_its_type():
    batch = Microbatch([ROWS], ROWS, 1.0, len(ROWS), 0)
    given = {"tenth": 0.1, "two": 2, "three": torch.tensor([3])}
    found = loss_and_metrics(lambda output, target: (mse_loss(output, target), given), ROWS, batch)[1]
    assert {name: float(x) for name, x in found.items()} == {"tenth": 0.1, "two": 2.0, "three": 3.0}
    for value in ("0.5", 0.5j, None):
        with pytest.raises(UsageError, match=f"the metric half should be one number, not a {type(value).__name__}"):
            loss_and_metrics(lambda *_, value=value: (torch.ones(()), {"half": value}), ROWS, batch)
