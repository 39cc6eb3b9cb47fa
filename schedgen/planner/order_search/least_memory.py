"""`least_memory`: the fewest saved forwards on a worker with which a step takes no longer than the scheme's own order.

It tries limits between what a lower bound on the latency excludes and what the scheme's own order takes, by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from schedgen.analysis import analyse
from schedgen.ir.cost import Amount, has_both
from schedgen.ir.program import Program
from schedgen.planner.order_search.found_order import BUDGET, FoundOrder, Limits, NoOrder, Ties
from schedgen.planner.order_search.order_search import search_order
from schedgen.planner.order_search.placed_problem import least_time
from schedgen.planner.order_search.schedules import compile_own, mean_ratios, measured, own_costs
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate


def least_memory(
    scheme: Scheme,
    sizes: Sizes,
    cost: Mapping[str, Amount],
    machine: Machine = Machine(),  # noqa: B008  frozen
    budget: int = BUDGET,
    tied: Ties = (),
) -> FoundOrder:
    """The schedule, its saved forwards as `value`, and as `bound` those with less than which no order is in time.

    Arguments as of `search_order`, which has a part of the budget for every limit; UsageError as there.
    """
    only_halves, cost = has_both(cost), own_costs(scheme, cost)
    own = compile_own(scheme, sizes, mean_ratios(cost, sizes), tied)
    time = measured(simulate(own, cost, machine), False)
    peak = _saved(own)
    least = 1
    while least < peak and least_time(scheme, sizes, cost, machine, Limits(saved=least)) > time * (1 + 1e-9):
        least += 1
    tries = max(1, math.ceil(math.log2(peak - least + 1)))
    program, source, low, work = own, scheme.name, least, 0.0
    while low < peak:
        limit = (low + peak) // 2
        what = machine, Limits(saved=limit), max(1, budget // tries), time, tied
        try:
            found = search_order(scheme, sizes, cost, *what, only_halves=only_halves)
        except NoOrder:
            low = limit + 1
            continue
        work += found.work
        if found.value <= time * (1 + 1e-9):
            program, source, peak = found.program, found.source, _saved(found.program)
            continue
        low = limit + 1
        if found.bound > time * (1 + 1e-9):
            least = low
    return FoundOrder(program, float(peak), float(least), peak <= least, work, source)


def _saved(program: Program) -> int:
    """The most saved forwards that a worker holds."""
    return int(analyse(program).memory.saved.max())
