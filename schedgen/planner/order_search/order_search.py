"""`search_order`: the order that ends first, for a placement, costs, messages and memory, and a bound.

begin   the orders of built-in schemes with this placement
find    better ones, by list scheduling and by annealing
prove   OR-Tools' CP-SAT, where the problem is small; it often finds a better one on its way
judge   the simulator has the last word: on time and, where the limit is in bytes, on memory

Work is counted, not seconds: the same call gives the same schedule on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.place import place
from schedgen.compiler.refine import refine
from schedgen.ir.cost import Amount, has_both
from schedgen.ir.program import Program
from schedgen.planner.order_search import cp_sat
from schedgen.planner.order_search.built_ins import Start, starts
from schedgen.planner.order_search.evaluate import new_run, run_order
from schedgen.planner.order_search.find_order import find_order
from schedgen.planner.order_search.found_order import BUDGET, FoundOrder, Limits, NoOrder, Ties
from schedgen.planner.order_search.placed_problem import as_placement, lower_bound, problem_of
from schedgen.planner.order_search.problem import Numbers, OrderProblem, Times, fits, most_held, order_of, places
from schedgen.planner.order_search.schedules import compile_order, compile_own, mean_ratios, measured, own_costs
from schedgen.planner.order_search.steady_states import steady_orders
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.footprint import Footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always

BYTES_SHARES = (0.1, 0.6, 0.3)  # of the work by round, for a limit in bytes: a schedule says what an order leaves out
SMALL_SHARES = (0.2, 0.4)  # of a problem for CP-SAT, which comes before the last round and takes most of the time
STEADY_SHARE = 0.02  # of the work, beside it: steady states that are tried
PROVED_SECONDS = 5.0  # CP-SAT's own deterministic seconds, for a budget of BUDGET


def search_order(
    scheme: Scheme,
    sizes: Sizes,
    cost: Mapping[str, Amount],
    machine: Machine = Machine(),  # noqa: B008  frozen
    limits: Limits = Limits(),  # noqa: B008  frozen
    budget: float = BUDGET,
    enough: float = 0.0,
    tied: Ties = (),
    only_halves: bool = False,
) -> FoundOrder:
    """The best order of a scheme's jobs, or the first that takes no more than `enough`; NoOrder where none keeps to the
    limits, UsageError for what the search does not know.

    `cost` has F, I, W or F, B, for all stages or by stage; of all four, those count that the scheme has. `budget`:
    millions of jobs that are given a time. `tied`: stages that share parameters, which the schedule then sums.
    `only_halves`: costs of whole backwards are left out of `cost`, so no schedule has any; without, they take I + W.
    """
    _check(scheme)
    only_halves |= has_both(cost)
    cost = own_costs(scheme, cost)
    placed = refine(place(as_placement(scheme, "I" in cost), sizes, Options()))
    if (placed.weights != placed.compute).any() or (placed.compute != placed.compute[0]).any():
        raise UsageError(f"{scheme.name} moves weights or backwards: search orders jobs that run beside the weights")
    problem = problem_of(placed, cost, machine, limits)
    rounds = _Rounds(problem, scheme, sizes, cost, machine, limits, tied)
    for start in starts(problem, placed, scheme, sizes, rounds.ratios):
        rounds.add_start(start, only_halves and "I" in cost)
    if limits.saved is not None:
        rounds.add_orders(steady_orders(problem, placed, limits.saved, int(STEADY_SHARE * budget * 10**6)))
    # A built-in scheme's whole backward never holds `half`, so bounds must hold without it.
    lenient = problem_of(placed, cost, machine._replace(half=np.minimum(machine.half, 0)), limits)
    bound, enough = lower_bound(lenient, placed), enough * (1 + 1e-9)
    small = cp_sat.is_installed() and len(problem.worker) <= cp_sat.MOST_JOBS
    shares = BYTES_SHARES if limits.bytes is not None else SMALL_SHARES if small else (1.0,)
    with compiled_always():
        for k, share in enumerate(shares):
            rounds.search(max(bound, enough), int(share * budget * 10**6), k)
            best = rounds.best()
            is_done = best is not None and best.value <= max(bound * (1 + 1e-9), enough)
            if small and k == len(shares) - 2 and best is not None and not is_done:
                bound = max(bound, rounds.prove(lenient, best, bound, PROVED_SECONDS * budget / BUDGET))
        best = rounds.best()
    if best is None:
        raise NoOrder("the search found no order within the memory limit: give it more of one, or of --budget")
    value = best.value
    work = rounds.work / 10**6
    return FoundOrder(best.program, value, min(bound, value), value <= bound * (1 + 1e-9), work, best.source)


class _Judged(NamedTuple):
    """An order, and what the simulator says of it."""

    source: str
    built_in: bool  # the order is of a built-in scheme
    order: Numbers
    program: Program
    value: float
    footprint: Footprint | None  # None where no limit is in bytes


class _Rounds:
    """The orders so far; where the limit is in bytes, what is left of it for what forwards save."""

    def __init__(
        self, problem: OrderProblem, scheme: Scheme, sizes: Sizes, cost: Mapping[str, Amount], machine: Machine,
        limits: Limits, tied: Ties,
    ) -> None:  # fmt: skip
        self.problem, self.scheme, self.sizes, self.limits = problem, scheme, sizes, limits
        self.cost, self.machine, self.tied = cost, machine, tied
        self.ratios = mean_ratios(cost, sizes)
        self.judged: list[_Judged] = []
        self.work = 0

    def add_start(self, start: Start, only_halves: bool) -> None:
        """Judge a built-in scheme, or its order of halves, unless it holds more saved forwards than it may."""
        if self.limits.saved is not None and not fits(self.problem, start.order):
            return
        if only_halves and not start.scheme.split:
            self._add(start.order, built_in=True)
            return
        program = compile_own(start.scheme, self.sizes, self.ratios, self.tied)
        self._judge(start.scheme.name, True, start.order, program)

    def add_orders(self, orders: Sequence[Numbers]) -> None:
        """Judge orders that are of no built-in scheme, those that fit."""
        for order in orders:
            if fits(self.problem, order):
                self._add(order)

    def search(self, bound: float, work: int, turn: int) -> None:
        """Find an order by so much work; another turn tries others."""
        problem = self._within(self._others())
        best = self.best()
        if best is not None and best.value <= bound * (1 + 1e-9):
            return
        begin = [judged.order for judged in self.judged if fits(problem, judged.order)]
        orders, used = find_order(problem, begin, bound, work, turn)
        self.work += used
        for order in orders:
            self._add(order)

    def prove(self, lenient: OrderProblem, best: _Judged, bound: float, seconds: float) -> float:
        """A lower bound by CP-SAT on a problem that takes no more memory, or 0; what it finds is added."""
        problem = lenient._replace(capacity=self._within(self._owned()).capacity)
        run = new_run(problem)
        value = run_order.sized(0)(problem, best.order, np.inf, run)
        proof = cp_sat.solve(problem, run.start, value, bound, seconds)
        if proof.start is not None and fits(problem, order := order_of(problem, proof.start)):  # times are rounded down
            self._add(order)
        return proof.bound

    def best(self) -> _Judged | None:
        """The fastest that keeps to the limits."""
        limit = self.limits.bytes
        fitting = [each for each in self.judged if limit is None or _footprint(each).peak.max() <= limit]
        return min(fitting, key=lambda judged: judged.value, default=None)

    def _add(self, order: Numbers, built_in: bool = False) -> None:
        shape = (len(self.ratios), self.sizes.stages, self.sizes.microbatches)
        n = places(self.problem, order).reshape(shape)
        program = compile_order(self.scheme, self.sizes, n, self.ratios, self.limits, self.tied)
        self._judge("search", built_in, order, program)

    def _judge(self, source: str, built_in: bool, order: Numbers, program: Program) -> None:
        run = simulate(program, self.cost, self.machine)
        footprint = None if self.limits.bytes is None else run.footprint
        self.judged.append(_Judged(source, built_in, order, program, measured(run, self.problem.own_window), footprint))

    def _within(self, others: Times) -> OrderProblem:
        """The problem with what `others`, bytes by worker, leave of the limit."""
        if self.limits.bytes is None:
            return self.problem
        return self.problem._replace(capacity=self.limits.bytes - others)

    def _owned(self) -> Times:
        """Bytes by worker that any order takes beside what forwards save."""
        if self.limits.bytes is None:
            return np.zeros(0)
        return _footprint(self.judged[0]).owned.astype(np.float64)

    def _others(self) -> Times:
        """Bytes by worker beside what forwards save: of the leanest built-in scheme, but no less than of orders found.

        An order found with too little room for the rest is over the limit; the next round leaves more.
        """
        if self.limits.bytes is None:
            return np.zeros(0)
        rests = [(judged, _footprint(judged).peak - most_held(self.problem, judged.order)) for judged in self.judged]
        nothing = np.zeros(len(self.problem.row) - 1)
        built_in = [rest for judged, rest in rests if judged.built_in]
        leanest: Times = min(built_in, key=lambda rest: float(rest.max()), default=nothing)
        most: Times = np.max([leanest, *(rest for judged, rest in rests if not judged.built_in)], axis=0)
        return most


def _footprint(judged: _Judged) -> Footprint:
    assert judged.footprint is not None
    return judged.footprint


def _check(scheme: Scheme) -> None:
    """UsageError for what the search does not know."""
    if scheme.updates != "flush":
        raise UsageError(f"{scheme.name} updates weights within a step, which fixes its order")
