"""How long a job of each direction takes, in the unit of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import Op
from schedgen.util.errors import UsageError

Amount = float | Sequence[float] | NDArray[np.float64]


DEFAULT_COST: dict[bool, Mapping[str, float]] = {False: {"F": 1, "B": 2}, True: {"F": 1, "I": 1, "W": 1}}


MOST_RATIO = 1e6  # of the longest job's duration to the shortest's


# The direction whose duration an instruction takes.
DIRECTION = {Op.FWD: "F", Op.RECOMPUTE: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def durations(cost: Mapping[str, Any] | None, split: bool) -> dict[str, Any]:
    """The duration of each direction a schedule has, a number or an array by stage.

    I and W together are the B of a schedule that does not split.
    """
    if cost is None:
        return dict(DEFAULT_COST[split])
    cost = {name: np.array(time) if isinstance(time, Sequence) else time for name, time in cost.items()}
    shortest, longest = (f([f(time) for time in cost.values()]) for f in (np.min, np.max))
    if not 0 < longest <= MOST_RATIO * shortest:
        raise UsageError("costs: the longest job may take a million times as long as the shortest, not more")
    if split and "B" in cost:
        raise UsageError("the schedule splits the backward: --cost must give F, I and W")
    return cost if split or "B" in cost else {"F": cost["F"], "B": cost["I"] + cost["W"]}


def by_stage(amount: Amount, stages: int) -> NDArray[np.float64]:
    """A number for all stages, or one each, as an array of one each."""
    return np.broadcast_to(np.asarray(amount, np.float64), (stages,))
