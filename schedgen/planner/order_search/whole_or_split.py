"""`search_whole_or_split`: an order, and which of its backwards are whole, if a whole one costs less than its halves.

A whole backward (B) goes over the layers once, and its halves (I, then W) go twice, so B often takes less than I + W.
But B sends its gradient only at its end. So halves are better where other workers wait for gradients, and whole
backwards are better elsewhere.

search   the best order of whole backwards alone, and of halves alone
anneal   each of these: jobs move, and backwards become whole or are split

The simulator has the last word, and the result is never worse than with whole backwards alone or halves alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from schedgen.ir.cost import by_stage, durations, has_both, shortest_halves, without_redo
from schedgen.ir.instructions import B, F, W
from schedgen.ir.program import Program
from schedgen.planner.order_search.annealing import HOT, Choice, anneal, temperatures
from schedgen.planner.order_search.budget import BUDGET, FEWEST_MOVES, WHOLE_AND_SPLIT_SHARES
from schedgen.planner.order_search.compiled_orders import compile_order, judge, numbers_of
from schedgen.planner.order_search.placed_problem import lenient, lower_bound, placed_jobs, problem_of
from schedgen.planner.order_search.problem import OrderProblem, fits, most_held, order_of, places
from schedgen.planner.order_search.question import FoundOrder, Question, reached
from schedgen.planner.order_search.run_order import new_run, run_order
from schedgen.planner.order_search.search_order import search_order
from schedgen.simulator.simulate import simulate
from schedgen.util.arrays import Flags, Numbers, Times
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always

LATER = (0.3, 0.03, 0.3, 0.03)  # temperatures for the best order, after those of HOT for each of the two
BEST = 4  # orders that the simulator judges


def search_whole_or_split(question: Question, budget: float = BUDGET) -> FoundOrder:
    """The best order within the limits; arguments and errors as for `search_order`.

    With costs of all of F, B, I and W it decides which backwards are whole; otherwise it is `search_order`. Nothing is
    redone: a cost of R is left out.
    """
    cost = without_redo(question.cost)
    if not has_both(cost):
        return search_order(question._replace(cost=cost), budget)
    durations(cost, 3)  # UsageError if they differ too much
    found, refusal = [], None
    for names, share in zip(("FB", "FIW"), WHOLE_AND_SPLIT_SHARES, strict=True):
        alone = question._replace(cost={name: cost[name] for name in names})
        try:
            found.append(search_order(alone, share * budget, only_halves="I" in names))
        except UsageError as error:
            refusal = error
    if not found:
        raise refusal or AssertionError
    choices = _Choices(question._replace(cost=cost))
    best, used = min(found, key=lambda each: each.value), sum(each.work for each in found)
    if not reached(best.value, choices.bound):
        with compiled_always():
            best = min([best, *choices.search(found, int((budget - used) * 10**6))], key=lambda each: each.value)
    return best._replace(bound=min(choices.bound, best.value), work=used + choices.work / 10**6)


class _Mixed(NamedTuple):
    """An order of halves, and which of them make whole backwards.

    Both the I and the W of a whole backward are marked, by job: in `OrderProblem.length` its I takes all the time and
    its W, at any place, none.
    """

    order: Numbers
    whole: Flags
    value: float  # the longest window


class _Choices:
    """Which backwards of an order are whole, for one placement, costs and limits."""

    def __init__(self, question: Question) -> None:
        self.question, self.limits, cost, sizes = question, question.limits, question.cost, question.sizes
        self.halves = question._replace(cost={name: cost[name] for name in "FIW"})
        placed = placed_jobs(self.halves)
        self.problem = problem_of(placed, self.halves)
        shortest = question._replace(cost=shortest_halves(cost, sizes.stages))
        self.bound = lower_bound(problem_of(placed, lenient(shortest)), placed)
        self.direction, stage = np.divmod(np.arange(len(self.problem.worker)) // sizes.microbatches, sizes.stages)
        self.per_half = sizes.stages * sizes.microbatches  # jobs: from the number of an I to that of its W
        self.whole_length = np.where(
            self.direction == B, by_stage(cost["B"], sizes.stages)[stage], 0.0
        )  # by job, of a whole backward
        self.work = 0

    def search(self, found: Sequence[FoundOrder], work: int) -> Iterator[FoundOrder]:
        """The results of annealing orders of whole backwards alone and of halves alone, with this much work."""
        orders = [order_of(self.problem, numbers_of(each.program, 3).ravel()) for each in found]
        problem = self._within(found[0].program, orders[0])
        begin = []
        for order, each in zip(orders, found, strict=True):
            all_whole = len(each.program.header.compute) == 2
            begin.append(self._with_value(order, all_whole & (self.direction > F)))
        tried, share = list(begin), work // (len(HOT) * len(begin) + len(LATER))
        for seed, (mixed, hot) in enumerate(product(begin, HOT)):
            tried.append(self._moved(problem, mixed, hot, share, seed))
        for seed, hot in enumerate(LATER, start=len(tried)):
            tried.append(self._moved(problem, min(tried, key=lambda each: each.value), hot, share, seed))
        for mixed in sorted(tried, key=lambda each: each.value)[:BEST]:
            n = self._numbers(mixed.order, mixed.whole)
            if fits(problem, order_of(problem, n)):
                yield from self._compiled(n, mixed.whole & (self.direction == B))

    def _moved(self, problem: OrderProblem, mixed: _Mixed, hot: float, work: int, seed: int) -> _Mixed:
        """Anneal from a temperature of `hot` mean durations of a job."""
        jobs, moves = len(mixed.order), max(FEWEST_MOVES, work // len(mixed.order))
        choice = Choice(mixed.whole.copy(), self.whole_length, problem.length)
        own = problem._replace(length=self._lengths(mixed.whole))
        _, order, judged = anneal.sized(jobs)(
            own, mixed.order.copy(), seed, moves, *temperatures(hot, float(problem.length.mean())), self.bound,
            new_run(problem), new_run(problem), choice,
        )  # fmt: skip
        self.work += judged * jobs
        return self._with_value(self._tidy(order, choice.whole), choice.whole)

    def _within(self, program: Program, order: Numbers) -> OrderProblem:
        """The problem with the capacity that a limit in bytes leaves for saved forwards, estimated from a program."""
        if self.limits.bytes is None:
            return self.problem
        peak = simulate(program, self.question.cost, self.question.machine).footprint.peak
        return self.problem._replace(capacity=self.limits.bytes - (peak - most_held(self.problem, order)))

    def _lengths(self, whole: Flags) -> Times:
        """By job: in a whole backward the I takes all its time, and the W none."""
        return np.where(whole, self.whole_length, self.problem.length)

    def _with_value(self, order: Numbers, whole: Flags) -> _Mixed:
        own, run = self.problem._replace(length=self._lengths(whole)), new_run(self.problem)
        return _Mixed(order, whole, run_order.sized(len(order))(own, order, np.inf, run))

    def _numbers(self, order: Numbers, whole: Flags) -> Numbers:
        """By job, a number that grows along each worker; the W of a whole backward comes directly after its I."""
        n = 2 * places(self.problem, order)
        second = np.flatnonzero(whole & (self.direction == W))
        n[second] = n[second - self.per_half] + 1
        return n

    def _tidy(self, order: Numbers, whole: Flags) -> Numbers:
        """The order with the W of whole backwards as early after their I as earlier W allow, to hold less memory."""
        n = self._numbers(order, whole)
        for jobs in np.split(self.problem.class_jobs, self.problem.class_first[1:-1]):
            n[jobs] = np.maximum.accumulate(n[jobs])
        return order_of(self.problem, n)

    def _compiled(self, n: Numbers, whole: Flags) -> Iterator[FoundOrder]:
        """The schedule of jobs in the order of n, if it keeps to a limit in bytes; `whole`, by job: I of whole ones."""
        shape = (3, self.problem.stages, self.problem.microbatches)
        program = compile_order(self.halves, n.reshape(shape), whole=whole.reshape(shape)[B])
        judged = judge(self.question, program)
        if judged.fits:
            yield FoundOrder(program, judged.value)
