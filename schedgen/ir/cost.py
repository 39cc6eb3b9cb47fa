"""Durations of jobs, in the schedule's unit of time: the defaults, and those that a user's costs give."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import DIRECTIONS, Op
from schedgen.ir.limits import MOST_RATIO
from schedgen.util.errors import UsageError

Amount = float | Sequence[float] | NDArray[np.float64]  # one for all stages, or one a stage

MOST_AMOUNT = 1e18  # seconds or bytes in a profile are below it

# By the number of directions.
DEFAULT_COST: dict[int, Mapping[str, float]] = {1: {"F": 1}, 2: {"F": 1, "B": 2}, 3: {"F": 1, "I": 1, "W": 1}}

# The direction whose duration an instruction takes.
DIRECTION = {Op.FWD: "F", Op.RECOMPUTE: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def is_amount(value: object) -> bool:
    """Whether a value of a profile is a number of seconds or bytes."""
    return type(value) in (int, float) and 0 <= value < MOST_AMOUNT  # type: ignore[operator]


REDO = "R"  # the key of a RECOMPUTE's duration among the costs, if it differs from F's; it may be 0


def redo_duration(cost: Mapping[str, Any]) -> Any:
    """How long a RECOMPUTE takes, a number or numbers by stage: R or, where there is none, F."""
    return cost.get(REDO, cost["F"])


def without_redo(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The costs without R, for a schedule that redoes nothing."""
    return {name: time for name, time in cost.items() if name != REDO}


def durations(cost: Mapping[str, Any] | None, directions: int, given: str = "--cost") -> dict[str, Any]:
    """The duration of each direction that a schedule has, a number or an array by stage; `cost` None: the default.

    With an unsplit backward, B is I + W unless it is given; with a split one, B is left out; in a list of forwards
    alone, everything but F is left out. R is always left out.
    UsageError if one is no time or missing, or they differ too much; `given`: where the error says they were given.
    """
    if cost is None:
        return dict(DEFAULT_COST[directions])
    for name, time in cost.items():
        amounts = np.ravel(time)
        good = np.isfinite(amounts) & (amounts >= 0 if name == REDO else amounts > 0)
        if not good.all():
            more = "of at least 0" if name == REDO else "above 0"
            raise UsageError(f"costs: {name} should be a time {more}, not {amounts[~good][0]}")
    cost = {name: np.array(time) if isinstance(time, Sequence) else time for name, time in cost.items() if name != REDO}
    shortest, longest = (f([f(time) for time in cost.values()]) for f in (np.min, np.max))
    if longest > MOST_RATIO * shortest:
        raise UsageError("costs: the longest job may take a million times as long as the shortest, not more")
    if directions == 1:
        return {"F": cost["F"]}
    if len(cost) == 1:
        raise UsageError(f"the schedule has backwards: {given} must give F and B, or F, I and W")
    if directions == 2:
        return {"F": cost["F"], "B": cost["B"] if "B" in cost else cost["I"] + cost["W"]}
    if "I" not in cost:
        raise UsageError(f"the schedule splits the backward: {given} must give F, I and W")
    return {name: cost[name] for name in DIRECTIONS[3]}


def own_costs(cost: Mapping[str, Any] | None, directions: int) -> dict[str, Any]:
    """`durations`, and R if it is given and there are backwards."""
    redo = {REDO: cost[REDO]} if cost and REDO in cost and directions > 1 else {}
    return durations(cost, directions) | redo


def whole_numbers(cost: Mapping[str, float], jobs: int) -> Mapping[str, float]:
    """The costs as whole numbers in the same proportions, so that sums for this many jobs are exact.

    Then rounding does not decide which of two times is the earlier. Returns the costs themselves if a ratio to F is not
    that of whole numbers up to a million, or the sums would be too large.
    """
    ratios = {name: float(time / cost["F"]) for name, time in cost.items()}
    fractions = {name: Fraction(ratio).limit_denominator(10**6) for name, ratio in ratios.items()}
    unit = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    exact = all(math.isclose(fractions[name], ratio, rel_tol=1e-15) for name, ratio in ratios.items())
    if not exact or 2 * jobs * unit * max(fractions.values()) >= 2**53:  # the redone forward of a backward counts, too
        return cost
    return {name: int(unit * fraction) for name, fraction in fractions.items()}


def has_both(cost: Mapping[str, Any]) -> bool:
    """Whether the costs of both whole and split backwards are known."""
    return "B" in cost and "I" in cost


def with_halves(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The costs with I and W: half of B each, where only B is known."""
    return dict(cost) if "I" in cost or "B" not in cost else {**cost, "I": cost["B"] / 2, "W": cost["B"] / 2}


def shortest_halves(cost: Mapping[str, Any], stages: int) -> dict[str, NDArray[np.float64]]:
    """F, I and W by stage, from costs that also have B: I is at most B, and W at most B - I.

    A schedule that mixes whole and split backwards takes at least as long as it would with these durations.
    """
    forward, whole, first, rest = (by_stage(cost[name], stages) for name in "FBIW")
    first = np.minimum(first, whole)
    return {"F": forward, "I": first, "W": np.minimum(rest, whole - first)}


def by_stage(amount: Amount, stages: int) -> NDArray[np.float64]:
    """`amount` as an array of one number a stage."""
    given = np.asarray(amount, np.float64)
    return given if given.shape == (stages,) else np.full(stages, given)


def read_cost(text: str) -> dict[str, float]:
    """The duration of every direction, from an option's text as in F=1,B=2, and R, that of a RECOMPUTE."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, digits = part.partition("=")
        try:
            value = float(digits)
        except ValueError:
            value = 0.0
        if name in values or not (1e-12 < value < 1e12 or (name == REDO and value == 0)):
            raise ArgumentTypeError(f"'{text}': give every direction once, as in F=1,B=2, with positive numbers")
        values[name] = int(value) if value.is_integer() else value
    known = (*DIRECTIONS.values(), ("F", "B", "I", "W"))
    names = next((names for names in known if set(names) == set(values) - {REDO}), None)
    if names is None:
        raise ArgumentTypeError(f"'{text}': give F and B, or F, I and W, or all four, or F of forwards alone")
    return {name: values[name] for name in (*names, *({REDO} & set(values)))}
