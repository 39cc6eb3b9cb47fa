"""What things cost: how long a job takes, how long a message, how many bytes a buffer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from schedgen.errors import UsageError
from schedgen.program import Op

DEFAULT_COST: dict[bool, Mapping[str, float]] = {False: {"F": 1, "B": 2}, True: {"F": 1, "I": 1, "W": 1}}
# The direction whose duration an instruction takes.
DIRECTION = {Op.FWD: "F", Op.RECOMPUTE: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def durations(cost: Mapping[str, float] | None, split: bool) -> dict[str, float]:
    """The duration of each direction a schedule has; I and W together are the B of one that does not split."""
    if cost is None:
        return dict(DEFAULT_COST[split])
    if max(cost.values()) > 1e6 * min(cost.values()):
        raise UsageError("--cost: the longest job may take a million times as long as the shortest, not more")
    if split and "B" in cost:
        raise UsageError("the schedule splits the backward: --cost must give F, I and W")
    return dict(cost) if split or "B" in cost else {"F": cost["F"], "B": cost["I"] + cost["W"]}


class Machine(NamedTuple):
    """Links and sizes. Time is in the unit of the jobs' durations, of which a message takes alpha + beta * bytes.

    Every rank has one link out and one link in, and a link carries one message
    at a time. With alpha and beta both zero messages take no time and wait for
    nobody.
    """

    alpha: float = 0.0  # time a message
    beta: float = 0.0  # time a byte
    activation: int = 1  # bytes of x.s.b, of g.s.b too
    weight: int = 1  # bytes of w.s, of dw.s too
    saved: int = 1  # bytes a forward keeps for its backward
