"""`search_placement`: the placement of stages on workers, with an order, that ends first, and a bound for all of them.

families  an order for each placement of the built-in pipelines, by `search_whole_or_split`
near      placements of each stage on one worker, near these families and near the one of least bound (`NearPlacements`)
judge     an order for the best of them, with as much work for each as for a family

So the result is never worse than what `search_whole_or_split` finds for a family with that much work.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedgen.ir.cost import has_both, shortest_halves
from schedgen.planner.order_search.heuristic_orders import heuristic_orders
from schedgen.planner.order_search.placed_problem import least_time, lenient, nodes_of, placed_jobs, problem_of
from schedgen.planner.order_search.problem import order_of
from schedgen.planner.order_search.question import BUDGET, FoundOrder, NoOrder, Question, reached
from schedgen.planner.order_search.run_order import new_run, run_order
from schedgen.planner.order_search.whole_or_split import search_whole_or_split
from schedgen.planner.placement_search.families import blocks, families, placed_on
from schedgen.planner.placement_search.near_placements import Judged, NearPlacements, Trial
from schedgen.planner.placement_search.stage_sets import Placement, StageSets, sets_of
from schedgen.schemes.scheme import Scheme
from schedgen.simulator.buffer_sizes import BufferSizes, buffer_sizes
from schedgen.util.arrays import Times
from schedgen.util.jit import compiled_always

NEAR_SHARE = 0.3  # of the work: for placements near the best
MESSAGES = 4  # activations of a stage, besides what forwards save: a worker seldom needs more room for messages
FINALISTS = 4  # placements near the best for which an order is searched


def search_placement(question: Question, budget: float = BUDGET) -> FoundOrder:
    """The best order of the best placement found; NoOrder if none keeps to the limits.

    The question is as for `search_whole_or_split`, with a scheme from `free_scheme`.
    """
    scheme, sizes, search = question.scheme, question.sizes, _Search(question)
    own = families(scheme, sizes)
    share = (1 - NEAR_SHARE) * budget / (len(own) + FINALISTS)
    several = [search.add(family.scheme, share) for family in own if family.placement is None]
    single = [family.placement for family in own if family.placement is not None]
    for placement in single:
        search.add(placed_on(scheme, placement), share)
    assert scheme.workers is not None
    bound, start = search.sets.least(scheme.workers, search.value)
    bound = min([bound, *several])
    if not reached(search.value, bound):
        near = NearPlacements(search.sets, search.estimate, scheme.workers, NEAR_SHARE * budget)
        starts = {*single, blocks(sizes.stages, scheme.workers), *([start] if start else [])}
        with compiled_always():
            judged = near.search(sorted(starts), bound)
        search.work += NEAR_SHARE * budget - near.left
        for other in [other for other in judged if other.placement not in single][:FINALISTS]:
            if other.bound < search.value * (1 - 1e-9) and not reached(search.value, bound):
                search.add(search.ordered(other), share)
    if search.best is None:
        raise NoOrder("no placement was found with an order within the memory limit: raise the limit or --budget")
    value, program = search.value, search.best.program
    program = replace(program, header=replace(program.header, scheme={**program.header.scheme, "name": scheme.name}))
    source = "search" if search.best.source == scheme.name else search.best.source
    return FoundOrder(program, value, min(bound, value), search.work, source)


def stage_sets(question: Question) -> StageSets:
    """The bounds of any placement, for costs of F, I, W or F, B."""
    sizes = question.sizes
    owned = np.zeros(sizes.stages)
    if question.limits.bytes is not None:
        bytes = _bytes_by_stage(question)
        owned = owned + bytes.owned + bytes.weight
        owned[-1] += sizes.microbatches * bytes.loss[-1]
    apart = placed_on(question.scheme, tuple(range(sizes.stages)))._replace(workers=sizes.stages)
    placed = placed_jobs(question._replace(scheme=apart))
    problem = problem_of(placed, lenient(question))
    nodes, capacity = nodes_of(problem, placed), float(problem.capacity[0])
    return StageSets(nodes, sizes.stages, sizes.microbatches, capacity, owned, problem.own_window)


def _bytes_by_stage(question: Question) -> BufferSizes:
    """The sizes of buffers, without those by edge, which no bound uses."""
    return buffer_sizes(question.machine._replace(edge_activation=None), question.sizes.stages)


class _Search:
    """The best order so far, and what all placements share."""

    def __init__(self, question: Question) -> None:
        self.question, cost, stages = question, question.cost, question.sizes.stages
        self.shortest = question._replace(cost=shortest_halves(cost, stages)) if has_both(cost) else question
        self.best: FoundOrder | None = None
        self.work = 0.0
        self.sets = stage_sets(self.shortest)
        self.spare = np.zeros(stages)
        if question.limits.bytes is not None:
            bytes = _bytes_by_stage(question)
            self.spare = MESSAGES * bytes.activation + np.max([self.spare, *bytes.workspace.values()], axis=0)

    @property
    def value(self) -> float:
        """The value of the best order; infinity if there is none."""
        return np.inf if self.best is None else self.best.value

    def add(self, scheme: Scheme, budget: float) -> float:
        """Search an order for a placement, and return a lower bound for all its orders."""
        try:
            found = search_whole_or_split(self.question._replace(scheme=scheme), budget)
        except NoOrder:
            return least_time(self.shortest._replace(scheme=scheme))
        self.work += found.work
        if found.value < self.value:
            self.best = found
        return found.bound

    def ordered(self, judged: Judged) -> Scheme:
        """The scheme with a placement and, if there is one, the order by which it was judged."""
        scheme, start = placed_on(self.question.scheme, judged.placement), judged.trial.start
        if not len(start):
            return scheme
        n = start.reshape(-1, self.sets.stages, self.sets.microbatches)
        order = f"search {self.question.limits.objective}"
        return scheme._replace(n=lambda s, b, d: n[d, s, b], order=order, mode="strict", split=len(n) == 3)

    def estimate(self, placement: Placement, bound: float, near: Times) -> Trial:
        """The best order of a placement by a few rules; `near`: start times in an order of another placement."""
        if not np.isfinite(bound):  # its weights exceed the limit
            return Trial(np.inf, np.zeros(0), 0.0)
        question = self.shortest._replace(scheme=placed_on(self.question.scheme, placement))
        problem = problem_of(placed_jobs(question), question)
        capacity = problem.capacity.copy()
        for worker, stages in enumerate(sets_of(placement)):
            capacity[worker] = self.sets.room(stages) - self.spare[np.array(placement) == worker].max()
        problem = problem._replace(capacity=capacity)
        orders, work = heuristic_orders(problem, [order_of(problem, near)] if len(near) else [], bound, 0)
        if not orders:
            return Trial(np.inf, np.zeros(0), work / 10**6)
        run = new_run(problem)
        return Trial(run_order.sized(0)(problem, orders[0], np.inf, run), run.start, work / 10**6)
