"""What NORM tells all ranks, and the rate that they step with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mpirun.engine.optimizer_step import are_equal, numbers_for_equality
from mpirun.engine.recipe import NamedParameter, Recipe
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
