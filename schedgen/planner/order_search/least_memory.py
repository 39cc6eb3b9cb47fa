"""`least_memory`: the fewest saved forwards on a worker for which a step takes no longer than in the scheme's order.

It bisects between the limits that a lower bound on the latency excludes and the memory of the scheme's own order.
"""

from __future__ import annotations

import math

from schedgen.analysis import analyse
from schedgen.ir.cost import has_both
from schedgen.ir.program import Program
from schedgen.planner.order_search.compiled_orders import compile_own, with_own_costs
from schedgen.planner.order_search.placed_problem import least_time
from schedgen.planner.order_search.question import BUDGET, FoundOrder, Limits, NoOrder, Question, reached
from schedgen.planner.order_search.search_order import search_order
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError


def least_memory(question: Question, budget: int = BUDGET) -> FoundOrder:
    """The schedule: `value` is the most saved forwards of a worker; with fewer than `bound`, no order is in time.

    Arguments and errors as for `search_order`, which gets a part of the budget for every limit. The question has no
    limits of its own.
    """
    if has_both(question.cost) and question.scheme.unsplit_backward is not None:
        raise UsageError(
            f"--objective memory needs all backwards whole or all split, and {question.scheme.name} has both: "
            "leave B out of the costs, so that a whole backward takes I + W"
        )
    only_halves, question = has_both(question.cost), with_own_costs(question)
    own = compile_own(question)
    time = simulate(own, question.cost, question.machine).latency
    peak = _saved(own)
    least = 1
    while least < peak and not reached(least_time(_within(question, least)), time):
        least += 1
    tries = max(1, math.ceil(math.log2(peak - least + 1)))
    program, source, low, work = own, question.scheme.name, least, 0.0
    while low < peak:
        limit = (low + peak) // 2
        try:
            found = search_order(_within(question, limit), max(1, budget // tries), time, only_halves)
        except NoOrder:
            low = limit + 1
            continue
        work += found.work
        if reached(found.value, time):
            program, source, peak = found.program, found.source, _saved(found.program)
            continue
        low = limit + 1
        if not reached(found.bound, time):
            least = low
    return FoundOrder(program, float(peak), float(least), work, source)


def _within(question: Question, saved: int) -> Question:
    return question._replace(limits=Limits(saved=saved))


def _saved(program: Program) -> int:
    """The most saved forwards that a worker holds."""
    return int(analyse(program).memory.saved.max())
