"""`search_order`: the order that ends first, for given placement, costs, messages and memory, and a bound.

begin   the orders of built-in schemes with this placement and, under a limit of forwards, of steady states
find    better ones, by list scheduling and by annealing
prove   OR-Tools' CP-SAT, if the problem is small; it often finds a better order on its way
judge   the simulator has the last word: on time and, if the limit is in bytes, on memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.place import PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.cost import Amount, has_both, own_costs, shortest_halves, without_redo
from schedgen.ir.instructions import B, F
from schedgen.ir.program import Program
from schedgen.ir.weights import FLUSH
from schedgen.planner.order_search import cp_sat
from schedgen.planner.order_search.compiled_orders import Judgement, compile_order, compile_own, judge, numbers_of
from schedgen.planner.order_search.heuristic_orders import heuristic_orders
from schedgen.planner.order_search.problem import (
    OrderProblem,
    fits,
    least_time,
    lenient,
    lower_bound,
    most_held,
    order_of,
    placed_jobs,
    places,
    problem_of,
    serial_order,
)
from schedgen.planner.order_search.question import BUDGET, FoundOrder, NoOrder, Question, reached
from schedgen.planner.order_search.run_order import new_run, run_order
from schedgen.planner.order_search.steady_states import steady_orders
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Scheme
from schedgen.util.arrays import Numbers, Times
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always

# How the budget is divided.
BYTES_SHARES = (0.1, 0.6, 0.3)  # by round, for a limit in bytes: rounds learn what else takes memory
SMALL_SHARES = (0.2, 0.4)  # for problems small enough for CP-SAT, which runs before the last round and takes most time
STEADY_SHARE = 0.02  # for steady states, in addition to the budget
PROVED_SECONDS = 5.0  # CP-SAT's own deterministic seconds, for a budget of BUDGET


def search_order(question: Question, budget: float = BUDGET) -> FoundOrder:
    """The best order of a scheme's jobs; NoOrder if none keeps to the limits, UsageError for what the search cannot
    handle.

    Given costs of whole backwards and of halves, it is the better of the best orders of whole backwards alone and of
    halves alone, with half of the budget each. Nothing is redone: a cost of R is left out. `budget`: millions of job
    start times computed.
    """
    cost = without_redo(question.cost)
    question = question._replace(cost=cost)
    if not has_both(cost):
        return _search(question, cost, budget)
    found, refusal = [], None
    for directions in (2, 3):
        try:
            found.append(_search(question, own_costs(cost, directions), budget / 2))
        except NoOrder as error:
            refusal = error
    if not found:
        raise refusal or AssertionError
    best = min(found, key=lambda each: each.value)
    bound = least_time(question._replace(cost=shortest_halves(cost, question.sizes.stages)))
    return best._replace(bound=min(bound, best.value), work=sum(each.work for each in found))


def _search(question: Question, cost: Mapping[str, Amount], budget: float) -> FoundOrder:
    """The best order of jobs whose directions are those of `cost`; `question` may have more costs, of built-in schemes'
    jobs."""
    scheme, limits = question.scheme, question.limits
    if scheme.updates != FLUSH:
        raise UsageError(f"{scheme.name} updates weights within a step, which fixes its order")
    ordered = question._replace(cost=cost)
    placed = placed_jobs(ordered)
    if (placed.weights != placed.compute).any() or (placed.compute != placed.compute[0]).any():
        raise UsageError(
            f"{scheme.name} moves weights or backwards: search only orders jobs that run where their weights are"
        )
    problem = problem_of(placed, ordered)
    rounds = _Rounds(question, problem)
    for built_in in same_placement(question, placed):
        rounds.add_scheme(built_in)
    if limits.saved is not None:
        rounds.add_orders(steady_orders(problem, placed, limits.saved, int(STEADY_SHARE * budget * 10**6)))
    bounded = problem_of(placed, lenient(ordered))
    bound = lower_bound(bounded, placed)
    small = cp_sat.is_installed() and len(problem.worker) <= cp_sat.MOST_JOBS
    shares = BYTES_SHARES if limits.bytes is not None else SMALL_SHARES if small else (1.0,)
    with compiled_always():
        for k, share in enumerate(shares):
            rounds.search(bound, int(share * budget * 10**6), k)
            best = rounds.best()
            is_done = best is not None and reached(best.judged.value, bound)
            if small and k == len(shares) - 2 and best is not None and not is_done:
                bound = max(bound, rounds.prove(bounded, best, bound, PROVED_SECONDS * budget / BUDGET))
        if rounds.best() is None:
            rounds.add_orders([serial_order(problem)])
        best = rounds.best()
    if best is None:
        raise NoOrder("the search found no order within the memory limit: raise the limit or --budget")
    value = best.judged.value
    return FoundOrder(best.judged.run.program, value, min(bound, value), rounds.work / 10**6, best.source)


def same_placement(question: Question, placed: PlacedScheme) -> Iterator[Scheme]:
    """The question's scheme itself, and each built-in one with its placement, for its model and with a flush."""
    searched, sizes = question.scheme, question.sizes
    layers = {name: value for name, value in searched.parameters.items() if name == "layers"}
    yield searched
    for name in SCHEMES:
        try:
            scheme = load(name, sizes)
            parameters = {**scheme.parameters, **layers}
            scheme = scheme._replace(edges=searched.edges, per_consumer=searched.per_consumer, parameters=parameters)
            compute = refine(place(scheme, sizes, Options())).compute
        except UsageError:  # such as one for other sizes
            continue
        if scheme.updates == FLUSH and np.array_equal(compute[[F, B]], placed.compute[[F, B]]):
            yield scheme


class _Tried(NamedTuple):
    """An order, and the simulator's result for it."""

    source: str
    built_in: bool  # the order is of a built-in scheme, or the serial one
    order: Numbers
    judged: Judgement


class _Rounds:
    """The orders judged so far and, if the limit is in bytes, the memory that is left for saved forwards."""

    def __init__(self, question: Question, problem: OrderProblem) -> None:
        self.question, self.limits, self.problem = question, question.limits, problem
        self.directions = len(problem.worker) // (problem.stages * problem.microbatches)
        self.tried: list[_Tried] = []
        self.work = 0

    def add_scheme(self, scheme: Scheme) -> None:
        """Judge a scheme, unless it does not compile or saves more forwards than allowed."""
        if scheme.split and self.directions == 2:  # what its halves save is no matter of this problem
            return
        with suppress(UsageError):  # such as one that needs another number of microbatches
            program = compile_own(self.question._replace(scheme=scheme))
            order = order_of(self.problem, numbers_of(program, self.directions).ravel())
            if self.limits.saved is None or fits(self.problem, order):
                self._judge(scheme.name, True, order, program)

    def add_orders(self, orders: Sequence[Numbers]) -> None:
        """Judge the orders that fit; they are of no built-in scheme."""
        for order in orders:
            if fits(self.problem, order):
                self._add(order)

    def search(self, bound: float, work: int, turn: int) -> None:
        """Search for orders with this much work; each turn draws different random numbers."""
        problem = self._within()
        best = self.best()
        if best is not None and reached(best.judged.value, bound):
            return
        begin = [tried.order for tried in self.tried if fits(problem, tried.order)]
        orders, used = heuristic_orders(problem, begin, bound, work, turn)
        self.work += used
        for order in orders:
            self._add(order)
        if not orders and self.limits.bytes is not None:  # the leanest so far leaves too little for saved forwards
            self._add(serial_order(self.problem), built_in=True)

    def prove(self, problem: OrderProblem, best: _Tried, bound: float, seconds: float) -> float:
        """A lower bound by CP-SAT on a problem that takes no more memory, or 0; the order that it finds is added."""
        if self.limits.bytes is not None:  # besides saved forwards, any order holds what workers own
            owned = self.tried[0].judged.run.footprint.owned.astype(np.float64)
            problem = problem._replace(capacity=self.limits.bytes - owned)
        run = new_run(problem)
        value = run_order.sized(0)(problem, best.order, np.inf, run)
        solution = cp_sat.solve(problem, run.start, value, bound, seconds)
        if solution.start is not None:
            order = order_of(problem, solution.start)
            if fits(problem, order):  # times are rounded down
                self._add(order)
        return solution.bound

    def best(self) -> _Tried | None:
        """The fastest order that keeps to the limits."""
        return min((each for each in self.tried if each.judged.fits), key=lambda each: each.judged.value, default=None)

    def _add(self, order: Numbers, built_in: bool = False) -> None:
        n = places(self.problem, order).reshape(-1, self.problem.stages, self.problem.microbatches)
        self._judge("search", built_in, order, compile_order(self.question, n))

    def _judge(self, source: str, built_in: bool, order: Numbers, program: Program) -> None:
        self.tried.append(_Tried(source, built_in, order, judge(self.question, program)))

    def _within(self) -> OrderProblem:
        """The problem with the capacity that a limit in bytes leaves for saved forwards.

        The rest of the memory is taken to be that of the leanest built-in scheme (or of the serial order, where a round
        found none), and no less than that of any order found. If this leaves too little for the rest, an order exceeds
        the limit, and the next round leaves more. What the best order so far holds is always allowed.
        """
        if self.limits.bytes is None:
            return self.problem
        rests = [
            (tried, tried.judged.run.footprint.peak - most_held(self.problem, tried.order)) for tried in self.tried
        ]
        nothing = np.zeros(len(self.problem.row) - 1)
        built_in = [rest for each, rest in rests if each.built_in]
        leanest: Times = min(built_in, key=lambda rest: float(rest.max()), default=nothing)
        most: Times = np.max([leanest, *(rest for each, rest in rests if not each.built_in)], axis=0)
        best = self.best()
        held = nothing if best is None else most_held(self.problem, best.order)
        return self.problem._replace(capacity=np.maximum(self.limits.bytes - most, held))
