"""`search_order`: the order that ends first, for a placement, costs, messages and memory, and a bound.

begin   the orders of built-in schemes with this placement
rules   list scheduling by random rules
anneal  the best of both, changed job by job
prove   OR-Tools' CP-SAT, where the problem is small
compile the best, as a strict order; the simulator says what it takes, and a built-in scheme that takes less is returned

Work is counted, not seconds: the same call gives the same schedule on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.compiler.place import PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.cost import Amount
from schedgen.ir.instructions import COMPUTE, B
from schedgen.ir.program import Program
from schedgen.planner.order_search import exact
from schedgen.planner.order_search.built_ins import Start, starts
from schedgen.planner.order_search.evaluate import new_run, run_order
from schedgen.planner.order_search.local_search import anneal
from schedgen.planner.order_search.priority_rules import find_rules
from schedgen.planner.order_search.problem import Numbers, OrderProblem, fits, make_problem, places
from schedgen.planner.search import cost_ratios
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.lower_bounds import order_bound, waits_for
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always
from schedgen.util.progress import counted

OBJECTIVES = ("window", "makespan")
BUDGET = 1000  # millions of jobs that are given a time
HOT = (0.03, 0.3, 2.0)  # temperatures to begin with, in mean durations of a job
RULE_JOBS = 4  # giving a job its time by a rule takes so much longer
PROVED_SECONDS = 5.0  # CP-SAT's own deterministic seconds, for a budget of BUDGET


class Limits(NamedTuple):
    """What an order must keep to, and what is made small."""

    objective: str = "makespan"  # or the longest own window, from a worker's first job to the end of its last
    saved: int | None = None  # saved forwards of a worker, from the start of F to the end of the last backward job
    bytes: float | None = None  # or bytes of a worker: the machine's `saved` from F to I, its `half` from I to W


class FoundOrder(NamedTuple):
    """A schedule and a lower bound."""

    program: Program
    value: float  # what the simulator says, in the unit of the costs
    bound: float  # no order of this placement within the limits takes less
    optimal: bool  # proved, by a bound that is reached
    work: int  # millions of jobs that were given a time
    source: str  # "search", or the built-in scheme that it found nothing better than


def search_order(
    scheme: Scheme,
    sizes: Sizes,
    cost: Mapping[str, Amount],
    machine: Machine = Machine(),  # noqa: B008  frozen
    limits: Limits = Limits(),  # noqa: B008  frozen
    budget: int = BUDGET,
) -> FoundOrder:
    """The best order of a scheme's jobs; UsageError where none keeps to the limits.

    `cost` has F, I, W or F, B, for all stages or by stage; `budget`: millions of jobs that are given a time.
    """
    _check(scheme)
    placed = refine(place(_as_placement(scheme, "I" in cost), sizes, Options()))
    if (placed.weights != placed.compute).any() or (placed.compute != placed.compute[0]).any():
        raise UsageError(f"{scheme.name} moves weights or backwards: search orders jobs that run beside the weights")
    problem = _problem(placed, cost, machine, limits)
    S = placed.compute.shape[1]
    ratios = cost_ratios({name: np.broadcast_to(np.asarray(t, float), (S,)) for name, t in cost.items()})
    bound = _bound(problem, placed)
    begin = [start for start in starts(problem, placed, scheme, sizes, ratios) if fits(problem, start.order)]
    with compiled_always():
        order, proof, work = _search(problem, [start.order for start in begin], bound, budget)
    bound = max(bound, proof)
    found = [] if order is None else [_compiled(problem, scheme, sizes, ratios, order, limits)]
    programs = [("search", program) for program in found] + [
        (start.scheme.name, _built_in(start, sizes, ratios)) for start in _best_starts(problem, begin)
    ]
    if not programs:
        raise UsageError("the search found no order within the memory limit: give it more of one, or of --budget")
    values = [measured(program, cost, machine, problem.own_window) for _, program in programs]
    best = int(np.argmin(values))
    value = values[best]
    return FoundOrder(programs[best][1], value, min(bound, value), value <= bound * (1 + 1e-9), work, programs[best][0])


def _check(scheme: Scheme) -> None:
    """UsageError for what the search does not know."""
    if scheme.updates != "flush":
        raise UsageError(f"{scheme.name} updates weights within a step, which fixes its order")


def _as_placement(scheme: Scheme, split: bool) -> Scheme:
    """The scheme without its order; a backward that it does not split has both halves in one place."""
    w = scheme.w
    return scheme._replace(
        w=w if scheme.split or not split else lambda s, b, d: w(s, b, np.minimum(d, B)),
        n=lambda s, b, d: 0 * (s + b + d),
        mode="greedy",
        split=split,
        unsplit_backward=None,
        delayed_send=None,
        cap=None,
    )


def _bound(problem: OrderProblem, placed: PlacedScheme) -> float:
    """What no order takes less than, whatever memory there is."""
    directions, stages, batches = placed.compute.shape
    worker = placed.compute.reshape(-1, batches)
    hops = {}
    for node in range(directions * stages):
        for k in range(problem.before_first[node], problem.before_first[node + 1]):
            other = int(problem.before[k])
            if (worker[node] != worker[other]).all():
                hops[other, node] = float(problem.before_hop[k])
    before = waits_for(placed.graph.edges, stages, directions)
    return order_bound(before, placed.compute, problem.length[::batches], hops, problem.own_window)


def _problem(placed: PlacedScheme, cost: Mapping[str, Amount], machine: Machine, limits: Limits) -> OrderProblem:
    """Memory is in saved forwards, or in bytes."""
    takes: tuple[Amount, ...] = (1, 0, -1) if placed.scheme.split else (1, -1)
    capacity = np.inf if limits.saved is None else float(limits.saved)
    if limits.bytes is not None:
        saved, half = (np.asarray(amount, np.float64) for amount in (machine.saved, machine.half))
        takes = (saved, half - saved, -half) if placed.scheme.split else (saved, -saved)
        capacity = limits.bytes
    if not np.isfinite(capacity):
        takes = tuple(0 * np.asarray(amount) for amount in takes)
        capacity = 1.0
    return make_problem(placed, cost, machine, takes, capacity, limits.objective == "window")


class _Search:
    """The best orders so far, and the work that is left."""

    def __init__(self, problem: OrderProblem, bound: float, budget: int) -> None:
        self.problem, self.bound, self.left = problem, bound, budget * 10**6
        self.run, self.trial = new_run(problem), new_run(problem)
        self.jobs = len(problem.worker)
        self.found: list[tuple[float, Numbers]] = []

    def judge(self, order: Numbers) -> float:
        """The longest window, and a tenth of the mean of all."""
        value: float = run_order.sized(self.jobs)(self.problem, order, np.inf, self.run)
        return value + 0.1 * float(self.run.window.mean())

    def add(self, order: Numbers) -> None:
        """Keep an order, if it ends and fits."""
        value = self.judge(order)
        if np.isfinite(value) and fits(self.problem, order):
            self.found.append((value, order))
            self.found.sort(key=lambda entry: entry[0])

    def anneal(self, order: Numbers, hot: float, share: float, seed: int) -> None:
        """Change an order for a share of the work that is left."""
        mean = float(self.problem.length.mean())
        moves = max(1000, int(share * self.left / self.jobs))
        _, better, judged = anneal.sized(self.jobs)(
            self.problem, order.copy(), seed, moves, hot * mean, 0.3 * min(hot, 0.1) * mean, self.bound,
            self.run, self.trial,
        )  # fmt: skip
        self.left -= judged * self.jobs
        self.add(better)

    @property
    def is_done(self) -> bool:
        """Whether the bound is reached."""
        return bool(self.found) and self.value <= self.bound * (1 + 1e-9)

    @property
    def value(self) -> float:
        """The longest window of the best order."""
        return float(run_order.sized(self.jobs)(self.problem, self.found[0][1], np.inf, self.run))


def _search(
    problem: OrderProblem, begin: list[Numbers], bound: float, budget: int
) -> tuple[Numbers | None, float, int]:
    """(the best order, a lower bound by proof or 0, millions of jobs that were given a time)."""
    search = _Search(problem, bound, budget)
    for order in begin:
        search.add(order)
    rounds = max(100, min(6000, search.left // (4 * RULE_JOBS * search.jobs)))
    with counted("search", None, "step") as done:
        for _, order in find_rules(problem, search.judge, rounds, 0, search.run):
            search.add(order)
        search.left -= rounds * RULE_JOBS * search.jobs
        if not search.found:
            return None, 0.0, budget - search.left // 10**6
        first = [order for _, order in search.found[:3]]
        seed = 0
        for order in first:
            for hot in HOT:
                if not search.is_done:
                    search.anneal(order, hot, 0.06, seed := seed + 1)
                    done(1)
        for share in (0.3, 0.4, 0.5, 1.0):
            if not search.is_done:
                search.anneal(search.found[0][1], HOT[seed % 3], share, seed := seed + 1)
                done(1)
    proof = 0.0
    if not search.is_done and search.jobs <= exact.MOST_JOBS and exact.is_installed():
        value = search.value
        proved = exact.solve(problem, search.run.start, value, bound, PROVED_SECONDS * budget / BUDGET)
        proof = proved.bound
        if proved.order is not None:
            search.add(proved.order)
    return search.found[0][1], proof, budget - search.left // 10**6


def _best_starts(problem: OrderProblem, begin: list[Start]) -> list[Start]:
    """The built-in scheme with the shortest longest window, in a list that is empty where none fits."""
    run = new_run(problem)
    return sorted(begin, key=lambda start: run_order.sized(0)(problem, start.order, np.inf, run))[:1]


def _compiled(
    problem: OrderProblem, scheme: Scheme, sizes: Sizes, ratios: Mapping[str, float], order: Numbers, limits: Limits
) -> Program:
    """The program of an order."""
    shape = (len(ratios), sizes.stages, sizes.microbatches)
    n = places(problem, order).reshape(shape)
    name = f"search {limits.objective}"
    scheme = _as_placement(scheme, len(ratios) == 3)._replace(n=lambda s, b, d: n[d, s, b], order=name, mode="strict")
    program = compile(scheme, sizes, Options(cost=ratios))
    if limits.saved is None:
        return program
    lowering = {**program.header.lowering, "memory_limit": limits.saved}
    return replace(program, header=replace(program.header, lowering=lowering))


def _built_in(start: Start, sizes: Sizes, ratios: Mapping[str, float]) -> Program:
    """The program of a built-in scheme."""
    cost = ratios if start.scheme.split or "B" in ratios else {"F": ratios["F"], "B": ratios["I"] + ratios["W"]}
    return compile(start.scheme, sizes, Options(cost=cost))


def measured(program: Program, cost: Mapping[str, Amount], machine: Machine, own_window: bool) -> float:
    """The latency of a program in the simulator, or its longest own window."""
    run = simulate(program, cost, machine)
    rows = np.flatnonzero(np.isin(program.rows.op, COMPUTE))
    rank = program.rows.rank[rows]
    first, last = np.full(program.header.workers, np.inf), np.zeros(program.header.workers)
    np.minimum.at(first, rank, run.start[rows])
    np.maximum.at(last, rank, run.end[rows])
    return float((last - first).max() if own_window else last.max())
