"""The input of an order search, `Question`, its result, `FoundOrder`, and how much work it does.

Work is counted, not seconds, so that the same call gives the same schedule on any machine. Its unit is the start time
of one job, computed by `run_order`. How it is divided is said where it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from schedgen.ir.cost import Amount
from schedgen.ir.program import Program
from schedgen.planner.order_search.ways import Way
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.util.errors import UsageError

BUDGET = 1000  # millions of job start times computed: the default of all searches
OBJECTIVES = ("window", "latency")
Ties = Collection[Sequence[int]]  # lists of stages that share parameters


class Limits(NamedTuple):
    """What an order must keep to, and what is minimized."""

    objective: str = "latency"  # or "window": the longest own window, from a worker's first job to the end of its last
    saved: int | None = None  # saved forwards on a worker, from the start of F to the end of the last backward job
    bytes: float | None = None  # or bytes on a worker, as the simulator counts them: `Footprint.peak`


class Question(NamedTuple):
    """The jobs of a scheme, what they cost, and what an order of them must keep to."""

    scheme: Scheme
    sizes: Sizes
    cost: Mapping[str, Amount]  # by direction, for all stages or by stage: F, I, W or F, B, or all, and perhaps R
    machine: Machine = Machine()
    limits: Limits = Limits()
    tied: Ties = ()  # stages that share parameters, which the schedule then sums
    ways: tuple[Way, ...] = (Way.REDO,)  # that forwards which are not kept may go, where forwards may be redone at all


class NoOrder(UsageError):
    """No order was found that keeps to the limits."""


class FoundOrder(NamedTuple):
    """A schedule and a lower bound."""

    program: Program
    value: float  # by the simulator, in the unit of the costs
    bound: float = 0.0  # no order of this placement within the limits takes less
    work: float = 0.0  # millions of job start times computed
    source: str = "search"  # or the built-in scheme that was not improved on

    @property
    def optimal(self) -> bool:
        """Whether the value is proved optimal, since it reaches the bound."""
        return reached(self.value, self.bound)


def reached(value: float, bound: float) -> bool:
    """Whether a value is no more than a bound, up to rounding."""
    return value <= bound * (1 + 1e-9)
