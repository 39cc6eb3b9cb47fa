"""What NORM tells all ranks, and the rate that they step with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from mpirun.comm.device import Device
from mpirun.engine.grad_buffers import GradBuffer
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.optimizer_step import are_equal, numbers_for_equality
from mpirun.engine.recipe import NamedParameter, Recipe
from mpirun.engine.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.stage_shape import StageShape
from schedgen.ir.limits import MOST_WORKERS


def test_whether_rates_are_the_same_is_told_of_as_many_ranks_as_there_may_be():
    """Their numbers are added in floats, one after the other."""
    rates = np.random.default_rng(0).random(100)
    for rate, other in zip(rates, rates[::-1], strict=True):
        columns = [np.full(MOST_WORKERS, number, float) for number in numbers_for_equality(rate)]
        assert are_equal(*(np.cumsum(column)[-1] for column in columns))
        for column, number in zip(columns, numbers_for_equality(other), strict=True):
            column[-1] = number
        assert not are_equal(*(np.cumsum(column)[-1] for column in columns))


def test_a_rate_that_is_one_tensor_for_all_optimizers_is_scheduled_once():
    rate = torch.tensor(0.01)
    recipe = Recipe(
        lambda named: torch.optim.Adam([entry.parameter for entry in named], lr=rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    weight = nn.Parameter(torch.ones(1))
    made = [recipe.make([NamedParameter("weight", weight, weight.shape, True)]) for _ in range(2)]
    for step in range(3):
        for optimizer in made:
            optimizer.set_rate(step)
        assert [optimizer.rate for optimizer in made] == pytest.approx([0.01 * 0.5**step] * 2)
    assert rate == torch.tensor(0.01)


class AssigningData(torch.optim.SGD):
    """Puts another tensor in the place of the weights."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


class AssigningGradients(torch.optim.SGD):
    """Puts another tensor in the place of the gradients."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 1
        super().step()


class Clearing(torch.optim.SGD):
    """Clears the gradients."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad()


def clearing_by_a_hook(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr)
    made.register_step_post_hook(lambda optimizer, *arguments: optimizer.zero_grad())
    return made


@pytest.mark.parametrize("make", [torch.optim.SGD, AssigningData, AssigningGradients, Clearing, clearing_by_a_hook])
def test_an_optimizer_may_assign_where_torch_s_write_in_place(make):
    """The engine has the weights and the gradients in memory of its own."""
    module = nn.Linear(3, 2, bias=False)
    model, shape = Model([module], mse_loss), StageShape((), ("weight",))
    stage = LocalStage(module, 0, shape, Device(), True)
    optimizer = Optimizer(Recipe(lambda named: make([entry.parameter for entry in named], 0.5)), model, {0: stage})
    (weight,), expected = stage.views(stage.weights), stage.views(stage.weights)[0].clone()
    gradient = GradBuffer(stage, [0], [torch.zeros(stage.size, dtype=torch.uint8)])
    (total,) = stage.views(gradient.total)
    for step in range(3):
        total.copy_(torch.randn(2, 3))
        expected -= 0.5 * total
        optimizer.step((0, -1), gradient, step, 0.0)
        assert torch.equal(weight, expected)
        assert torch.equal(module.weight, expected)
