"""The optimizers of a rank: what they may assign, and what checkpoints have of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from mpirun.comm.device import Device
from mpirun.engine.core.grad_buffers import GradBuffer
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.recipe import Recipe
from mpirun.model.contract import Model
from mpirun.model.stage_shape import StageShape
from schedgen.util.errors import UsageError


def linear(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[Optimizer, LocalStage, GradBuffer]:
    """The optimizer of a rank with one matrix, its stage and its gradient."""
    module = nn.Linear(3, 2, bias=False)
    stage = LocalStage(module, 0, StageShape((), ("weight",)), Device(), owned_shards=(-1,))
    recipe = Recipe(lambda named: make([entry.parameter for entry in named]))
    optimizer = Optimizer(recipe, Model([module], mse_loss), {0: stage})
    return optimizer, stage, GradBuffer(stage, [0], [torch.zeros(stage.size, dtype=torch.uint8)])


@pytest.mark.parametrize("options", [{}, {"lr": None}])
def test_the_rate_of_an_optimizer_that_has_none_is_0(options):
    """That of Adafactor in transformers is None where it chooses the rate itself."""
    optimizer, *_ = linear(lambda parameters: torch.optim.Optimizer(parameters, options))
    assert optimizer.rate(0) == 0


class AssigningData(torch.optim.SGD):
    """Puts another tensor in the place of the weights."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


@pytest.mark.parametrize("make", [torch.optim.SGD, AssigningData])
def test_an_optimizer_may_assign_where_torch_s_write_in_place(make):
    """The engine has the weights and the gradients in memory of its own."""
    optimizer, stage, gradient = linear(lambda parameters: make(parameters, 0.5))
    (weight,), (total,) = stage.views(stage.weights), stage.views(gradient.total)
    expected = weight.clone()
    for step in range(3):
        total.copy_(torch.randn(2, 3))
        expected -= 0.5 * total
        optimizer.step((0, -1), gradient, step, 0.0)
        assert torch.equal(weight, expected)
        assert torch.equal(stage.module.weight, expected)


def put(**options: Any) -> Callable[[torch.optim.Optimizer], None]:
    """A function that changes options of the first group."""
    return lambda made: made.param_groups[0].update(options)


LACK = "checkpoints have only what it keeps in `state` by parameter"
KEPT: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str | None]] = {
    "a rate": (put(lr=0.5), None),
    "a number of a group": (put(calls=1), f"SGD keeps calls: {LACK}"),
    "another option": (put(momentum=torch.tensor(0.9)), f"SGD keeps momentum: {LACK}"),
    "state of no parameter": (lambda made: made.state["calls"].update(x=1), f"SGD keeps state of calls: {LACK}"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_checkpoints_would_lose_of_a_state_dict_is_refused(case):
    change, why = KEPT[case]
    optimizer, *_ = linear(lambda parameters: torch.optim.SGD(parameters, 0.1))
    change(optimizer.by_unit[0, -1].optimizers[0])
    with contextlib.nullcontext() if why is None else pytest.raises(UsageError, match=f"^the optimizer {why}"):
        optimizer.check_saved()
