"""What is found of stages before the first step: which outputs lie in other memory, what forwards change and draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mpirun.data.microbatches import Microbatches
from mpirun.model.contract import Model
from mpirun.model.shapes import StageShape, infer_shapes

ROWS = torch.linspace(-1, 1, 24).view(4, 6)


def shape_of(*stages: object) -> StageShape:
    """That of the first of them."""
    model = Model(stages, mse_loss, lambda text, rng: (ROWS, ROWS))
    reads = model.resolved_reads([(), *((s,) for s in range(len(stages) - 1))], 1)
    return infer_shapes(model, reads, Microbatches(model.batch, torch.zeros(1), 0, 1)(0, 0))[0]


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
    assert shape_of(make(*asks), First()).aliased_outputs == (1, 2, 3)
