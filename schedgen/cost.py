"""How long a job takes, by direction: what greedy orders by and what times are measured in."""

from __future__ import annotations

from collections.abc import Mapping

from schedgen.errors import UsageError
from schedgen.program import Op

DEFAULT_COST: dict[bool, Mapping[str, float]] = {False: {"F": 1, "B": 2}, True: {"F": 1, "I": 1, "W": 1}}


def durations(cost: Mapping[str, float] | None, split: bool) -> dict[str, float]:
    """The duration of each direction a schedule has; I and W together are the B of one that does not split."""
    if cost is None:
        return dict(DEFAULT_COST[split])
    if split and "B" in cost:
        raise UsageError("the schedule splits the backward: --cost must give F, I and W")
    return dict(cost) if split or "B" in cost else {"F": cost["F"], "B": cost["I"] + cost["W"]}


# The direction whose duration an instruction takes.
DIRECTION = {Op.FWD: "F", Op.RECOMPUTE: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}
