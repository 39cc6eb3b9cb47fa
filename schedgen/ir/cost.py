"""Durations of jobs, in the unit of the schedule: the defaults, and how a user's become those of each direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import DIRECTIONS, Op
from schedgen.ir.limits import MOST_RATIO
from schedgen.util.errors import UsageError

Amount = float | Sequence[float] | NDArray[np.float64]  # of every stage, or by stage

# By the number of directions.
DEFAULT_COST: dict[int, Mapping[str, float]] = {1: {"F": 1}, 2: {"F": 1, "B": 2}, 3: {"F": 1, "I": 1, "W": 1}}

# The direction whose duration an instruction takes.
DIRECTION = {Op.FWD: "F", Op.RECOMPUTE: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def is_amount(value: object) -> bool:
    """Whether a value of a profile is a number of seconds or bytes."""
    return type(value) in (int, float) and 0 <= value < 1e18  # type: ignore[operator]


REDO = "R"  # the duration of a RECOMPUTE, among the costs where it is not that of F; it may be 0


def redo_duration(cost: Mapping[str, Any]) -> Any:
    """How long a RECOMPUTE takes, a number or numbers by stage: R or, where there is none, F."""
    return cost.get(REDO, cost["F"])


def without_redo(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The costs without R: nothing is redone."""
    return {name: time for name, time in cost.items() if name != REDO}


def durations(cost: Mapping[str, Any] | None, directions: int) -> dict[str, Any]:
    """The duration of each direction that a schedule has, a number or an array by stage; None: the default.

    Of a schedule that does not split the backward, B is I + W unless it is given; of one that does, B is left out;
    of forwards alone, only F does. R is left out.
    UsageError where they differ too much, or one is missing.
    """
    if cost is None:
        return dict(DEFAULT_COST[directions])
    cost = {name: np.array(time) if isinstance(time, Sequence) else time for name, time in cost.items() if name != REDO}
    shortest, longest = (f([f(time) for time in cost.values()]) for f in (np.min, np.max))
    if not 0 < longest <= MOST_RATIO * shortest:
        raise UsageError("costs: the longest job may take a million times as long as the shortest, not more")
    if directions == 1:
        return {"F": cost["F"]}
    if len(cost) == 1:
        raise UsageError("the schedule has backwards: --cost must give F and B, or F, I and W")
    if directions == 2:
        return {"F": cost["F"], "B": cost["B"] if "B" in cost else cost["I"] + cost["W"]}
    if "I" not in cost:
        raise UsageError("the schedule splits the backward: --cost must give F, I and W")
    return {name: cost[name] for name in DIRECTIONS[3]}


def has_both(cost: Mapping[str, Any]) -> bool:
    """Whether costs are known of whole backwards and of their halves."""
    return "B" in cost and "I" in cost


def shortest_halves(cost: Mapping[str, Any], stages: int) -> dict[str, NDArray[np.float64]]:
    """F, I and W by stage, of costs with B, too: W is no longer than what a whole backward takes behind its I.

    No schedule whose backwards are partly whole takes less than with these.
    """
    forward, whole, first, rest = (by_stage(cost[name], stages) for name in "FBIW")
    first = np.minimum(first, whole)
    return {"F": forward, "I": first, "W": np.minimum(rest, whole - first)}


def by_stage(amount: Amount, stages: int) -> NDArray[np.float64]:
    """`amount` as an array of one number a stage."""
    return np.broadcast_to(np.asarray(amount, np.float64), (stages,))
