"""`heuristic_orders`: the best orders of a problem, by random rules and then annealing."""

from __future__ import annotations

import numpy as np

from schedgen.planner.order_search.annealing import HOT, anneal
from schedgen.planner.order_search.budget import FEWEST_MOVES, LEAST_MOVES, RULE_JOBS, RULES
from schedgen.planner.order_search.priority_rules import find_rules
from schedgen.planner.order_search.problem import OrderProblem, fits, serial_order
from schedgen.planner.order_search.question import reached
from schedgen.planner.order_search.run_order import new_run, run_and_judge
from schedgen.util.arrays import Numbers
from schedgen.util.progress import counted

BEST = 4  # orders that are returned


def heuristic_orders(
    problem: OrderProblem, begin: list[Numbers], bound: float, budget: int, turn: int = 0
) -> tuple[list[Numbers], int]:
    """The best orders, empty if none keeps to the memory, and the work they took, in job start times computed.

    The search starts from the orders of `begin` and ends when `bound` is reached, or after about `budget`. Each `turn`
    draws different random numbers.
    """
    search = _Search(problem, bound, budget)
    for order in begin:
        search.add(order)
    if search.is_done:
        return search.best(), budget - search.left
    anneals = budget // search.jobs >= LEAST_MOVES
    rounds = budget // ((4 if anneals else 1) * RULE_JOBS * search.jobs)
    rounds = max(RULES[0], min(RULES[1], rounds))
    with counted("search", None) as done:
        for order in find_rules(problem, rounds, turn, search.run):
            search.add(order)
        search.left -= rounds * RULE_JOBS * search.jobs
        if not search.found:  # as where routes cross: each worker waits for the memory of another
            search.add(serial_order(problem))
        if not search.found:
            return [], budget - search.left
        first = [order for _, _, order in search.found[:3]] if anneals else []
        seed = 1000 * turn
        for order in first:
            for hot in HOT:
                if not search.is_done:
                    search.anneal(order, hot, 0.06, seed := seed + 1)
                    done(1)
        for share in (0.3, 0.4, 0.5, 1.0) if anneals else ():
            if not search.is_done:
                search.anneal(search.found[0][2], HOT[seed % 3], share, seed := seed + 1)
                done(1)
    return search.best(), budget - search.left


class _Search:
    """The best orders so far, and the work that is left."""

    def __init__(self, problem: OrderProblem, bound: float, budget: int) -> None:
        self.problem, self.bound, self.left = problem, bound, budget
        self.run, self.trial = new_run(problem), new_run(problem)
        self.jobs = len(problem.worker)
        self.found: list[tuple[float, float, Numbers]] = []  # what `run_and_judge` returns, longest window, order

    def add(self, order: Numbers) -> None:
        """Keep an order, if it can run and fits."""
        value = run_and_judge(self.problem, order, self.run)
        if np.isfinite(value) and fits(self.problem, order) and all(value != known for known, _, _ in self.found):
            self.found.append((value, float(self.run.window.max()), order))
            self.found.sort(key=lambda entry: entry[0])

    def best(self) -> list[Numbers]:
        """The orders with the shortest longest windows, the best first."""
        return [order for _, _, order in sorted(self.found, key=lambda entry: entry[1])[:BEST]]

    def anneal(self, order: Numbers, hot: float, share: float, seed: int) -> None:
        """Anneal an order with a share of the work that is left."""
        moves, mean = max(FEWEST_MOVES, int(share * self.left / self.jobs)), float(self.problem.length.mean())
        _, better, judged = anneal.sized(self.jobs)(
            self.problem, order.copy(), seed, moves, hot * mean, 0.3 * min(hot, 0.1) * mean, self.bound, self.run,
            self.trial,
        )  # fmt: skip
        self.left -= judged * self.jobs
        self.add(better)

    @property
    def is_done(self) -> bool:
        """Whether the bound is reached."""
        return any(reached(window, self.bound) for _, window, _ in self.found)
