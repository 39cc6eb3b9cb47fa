"""What NORM tells all ranks."""

from __future__ import annotations

import numpy as np

from mpirun.engine.optimizer_step import are_equal, numbers_for_equality
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
