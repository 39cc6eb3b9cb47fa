"""`search_ways`: an order, and whether each forward is kept, redone or away, so that it keeps to the memory limit.

keep     the best order that keeps everything, by `search_order`
loosen   the orders of built-in schemes, and the best orders under looser limits; in each, few forwards are redone or
         away so that it fits (`ways.choose`); if none can fit, each again with every W directly behind its I
redo     the best orders in which whole stages are redone: the stages that loosened orders redo most, or all stages;
         forwards for which there is room are kept after all
improve  in the best of them forwards go another way, one by one and in pairs, while that ends sooner

The simulator has the last word, and the result is never worse than the order that keeps everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from schedgen.checker import check_compiled
from schedgen.ir.cost import (
    Amount,
    by_stage,
    durations,
    has_both,
    own_costs,
    redo_duration,
    shortest_halves,
    without_redo,
)
from schedgen.ir.instructions import B, F
from schedgen.planner.order_search.compiled_orders import Judgement, compile_order, compile_own, judge, numbers_of
from schedgen.planner.order_search.heuristic_orders import heuristic_orders
from schedgen.planner.order_search.problem import (
    OrderProblem,
    class_nodes,
    kept_by_stage,
    least_time,
    placed_jobs,
    places,
    problem_of,
)
from schedgen.planner.order_search.question import (
    BUDGET,
    OBJECTIVES,
    FoundOrder,
    Limits,
    NoOrder,
    Question,
    Ties,
    reached,
)
from schedgen.planner.order_search.search_order import same_placement, search_order
from schedgen.planner.order_search.ways import (
    ROOM,
    Kept,
    Way,
    Ways,
    WorkerOrder,
    choose,
    held,
    most_held,
    worker_orders,
)
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.arrays import Flags, Numbers, Times
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always

LOOSER = (1.25, 1.5, 2.0, np.inf)  # limits that orders are searched under, as multiples of the real one
SHARES = (0.5, 0.9, 1.2, 10.0)  # of the time of jobs that copies to the host's memory may take, each tried
STARTS = 4  # ways of the best order that are improved
JUDGED_JOBS = 600  # compiling and simulating an order takes this many times as long as `run_order` for each job
MOST_JUDGED = 2000  # changes of the ways of an order's forwards that are judged
TIGHTER = 4  # times that a limit in bytes is tightened, if a schedule holds more besides saved forwards


def search(
    scheme: Scheme, sizes: Sizes, cost: Mapping[str, Amount] | None = None, machine: Machine | None = None, *,
    memory_limit: int | None = None, memory: float | None = None, objective: str = "latency", tied: Ties = (),
    recompute: bool = False, offload: bool = False, budget: int = BUDGET,
) -> FoundOrder:  # fmt: skip
    """The order of a scheme's jobs that ends first: its `program` and, in the unit of the costs, `value` and `bound`.

    cost          by direction, for all stages or by stage; default: F=1, B=2 or, if backwards are split, all 1
    memory_limit  saved forwards that a worker may hold; or `memory`: bytes that it may need; default: a device's
    objective     what is minimized: latency, or window, the longest from a worker's first job to the end of its last
    tied          stages that share parameters
    recompute     whether forwards may be redone to keep to the memory
    offload       whether what they save may be away in the memory of the host, whose link the machine's network has
    budget        the work, in millions of job start times

    UsageError if no order keeps to the memory, or for what the search cannot handle.
    """
    cost = cost or own_costs(None, 3 if scheme.split else 2)
    durations(cost, 2)  # UsageError if they are no times, or of forwards alone
    if objective not in OBJECTIVES:
        raise UsageError(f"objective {objective!r} is none of {', '.join(OBJECTIVES)}")
    if memory_limit is not None and memory is not None:
        raise UsageError("memory_limit counts saved forwards and memory counts bytes: give one of them")
    machine = machine or Machine()
    if offload and not machine.network.host.is_known:
        raise UsageError("--offload needs the link to the memory of the host: give a machine file that has it")
    ways = tuple(way for way, allowed in ((Way.REDO, recompute), (Way.AWAY, offload)) if allowed)
    question = Question(scheme, sizes, cost, machine, Limits(objective, memory_limit, memory), tied, ways)
    if machine.network.memory != math.inf:
        if memory_limit is not None:
            raise UsageError("memory_limit counts saved forwards, and the machine's devices have bytes: leave one out")
        least = min(machine.network.least_memory(placed_jobs(question).workers), memory or math.inf)
        question = question._replace(limits=question.limits._replace(bytes=least))
    best = (search_ways if ways else search_order)(question, budget)
    check_compiled(best.program)
    return best


def search_ways(question: Question, budget: int = BUDGET) -> FoundOrder:
    """The best order within the limits and the ways of its forwards; UsageError if none keeps to them.

    With costs of all of F, B, I and W, backwards are as in the scheme if forwards are redone. R is the time of a
    RECOMPUTE. `budget`: as for `search_order`, and as much again for orders that redo forwards.
    """
    kept = question._replace(cost=without_redo(question.cost))
    if kept.limits.saved is None and kept.limits.bytes is None:
        return search_order(kept, budget)
    best: FoundOrder | None = None
    with suppress(NoOrder):
        best = search_order(kept, budget)
    free = kept._replace(limits=Limits(kept.limits.objective))
    if has_both(kept.cost):
        question = question._replace(cost=own_costs(question.cost, 3 if question.scheme.split else 2))
        free = free._replace(cost=shortest_halves(kept.cost, kept.sizes.stages))
    work, least = 0 if best is None else best.work, least_time(free)
    if best is not None and reached(best.value, least):
        return best
    tries = _Tries(question, least)
    decided = [(n, starts) for n in tries.orders(budget) if (starts := tries.decided(n))]
    if decided:
        judged = tries.improved(*min(decided, key=lambda each: each[1][0].rank), budget).judged
        if judged.fits and (best is None or judged.value < best.value):
            best = FoundOrder(judged.run.program, judged.value)
    if best is None:
        raise UsageError(
            "the search found no order within the memory limit, even with forwards redone: raise the limit or --budget"
        )
    return best._replace(bound=min(least, best.value), work=work + tries.work)


class _Decided(NamedTuple):
    """The ways of an order's forwards, and the simulator's results."""

    ways: Ways
    judged: Judgement

    @property
    def rank(self) -> tuple[float, float]:
        """By how much it exceeds the limits, and its time: the less the better."""
        return self.judged.over, self.judged.value


class _Tries:
    """Orders and the ways of their forwards, for one placement, costs and limits."""

    def __init__(self, question: Question, bound: float) -> None:
        self.question, self.limits, self.bound = question, question.limits, bound
        self.plain = question._replace(cost=without_redo(question.cost))  # if nothing is redone
        self.placed = placed_jobs(question)
        self.worker = self.placed.compute[F].astype(np.int64)
        inputs, saved, half = kept_by_stage(self.placed, question)
        stages, host = question.sizes.stages, question.machine.network.host
        link = host.beta * by_stage(question.machine.saved, stages)
        copy = np.where(link > 0, host.alpha, 0.0) + link
        redo = by_stage(redo_duration(question.cost), stages)
        lengths = np.stack([by_stage(time, stages) for time in self.plain.cost.values()])
        graph = saved if self.limits.bytes is not None else 0 * saved
        freed = 0 if question.machine.freed is None else by_stage(question.machine.freed, stages)
        whole = np.maximum(half + freed, 0) if self.limits.bytes is not None else half
        self.kept = Kept(inputs, saved, half, whole, graph, redo, copy, lengths)
        sharers = min(host.devices, self.placed.workers)
        self.shares = (0.0, *(share / sharers for share in SHARES)) if Way.AWAY in question.ways else (0.0,)
        self.work = 0.0
        self.others = np.zeros(self.placed.workers)  # bytes by worker that the last order held besides saved forwards
        self.most: list[Flags] = []  # by order so far, the forwards that it does not keep

    def orders(self, budget: int) -> Iterator[Numbers]:
        """Numbers of every job, (D, S, B), that grow along each worker: one array for each order to try."""
        for scheme in same_placement(self.plain, self.placed):
            with suppress(UsageError):  # such as one that needs another number of microbatches
                if not scheme.split or self.placed.scheme.split:
                    yield numbers_of(compile_own(self.plain._replace(scheme=scheme)), len(self.placed.compute))
        share = max(1, budget // (2 * len(LOOSER)))
        loosened: list[Numbers] = []
        for part in LOOSER:
            try:
                found = search_order(self.plain._replace(limits=self._loosened(part), tied=()), share)
            except NoOrder:
                continue
            self.work += found.work
            loosened.append(numbers_of(found.program, len(self.plain.cost)))
            yield loosened[-1]
        if not self.most and self.placed.scheme.split:  # what is held from I to a late W cannot be redone
            for n in loosened:
                yield np.stack([2 * n[F], 2 * n[B], 2 * n[B] + 1])
        _, stages, _ = self.placed.compute.shape
        share_redone = np.mean(self.most, axis=(0, 2)) if self.most else np.zeros(stages)
        sets = {tuple(np.flatnonzero(share_redone >= least).tolist()) for least in (0.3, 0.6, 0.0)}
        for named in sorted(sets):
            problem = self._with_redone(np.isin(np.arange(stages), named))
            with compiled_always():
                orders, used = heuristic_orders(problem, [], self.bound, 10**6 * budget // (2 * len(sets)))
            self.work += used / 10**6
            for order in orders:
                yield places(problem, order).reshape(self.placed.compute.shape)

    def judged(self, n: Numbers, ways: Ways) -> _Decided | None:
        """The simulator's results for an order and its ways; None if it does not compile."""
        with suppress(UsageError):  # as where nothing would be away while a job runs
            return _Decided(ways, judge(self.question, compile_order(self.question, n, ways)))
        return None

    def decided(self, n: Numbers) -> list[_Decided]:
        """The best ways of an order, few, the best first; with none of them it may keep to the limits."""
        redo, orders, limit = Way.REDO in self.question.ways, self._worker_orders(n), self.limits.bytes
        kept = np.zeros(self.worker.shape, np.int8)
        alike = [np.full_like(kept, way) for way in self.question.ways]
        tried = {ways.tobytes(): self.judged(n, ways) for ways in alike}
        for share, capacity in product(self.shares if redo else self.shares[1:], self._capacities(n, orders)):
            for _ in range(1 if limit is None else TIGHTER):  # again if the simulator finds bytes above the limit
                ways = choose(orders, self.kept, capacity, kept, share, redo)
                if ways is None:
                    break
                self.most.append(ways != Way.KEEP)
                key = ways.tobytes()
                found = tried[key] = tried[key] if key in tried else self.judged(n, ways)
                if found is None or found.judged.fits or limit is None:
                    break
                capacity = capacity - np.maximum(found.judged.run.footprint.peak - limit, 0)
        return sorted(filter(None, tried.values()), key=lambda each: each.rank)[:STARTS]

    def improved(self, n: Numbers, starts: Sequence[_Decided], budget: int) -> _Decided:
        """The best that is found from these starts, with other ways of one forward or two, while it gets better."""
        orders, best = self._worker_orders(n), starts[0]
        for start in starts:
            left, now, better = min(MOST_JUDGED, 10**6 * budget // (len(starts) * JUDGED_JOBS * n.size)), start, True
            while better and left > 0 and not (best.judged.fits and reached(best.judged.value, self.bound)):
                better = False
                for ways in self._neighbours(orders, now):
                    left -= 1
                    self.work += JUDGED_JOBS * n.size / 10**6
                    found = self.judged(n, ways)
                    if found is not None and found.rank < (now.rank[0], now.rank[1] * (1 - 1e-9)):  # not only rounded
                        now, better = found, True
                    if better or left <= 0:
                        break
            best = min(best, now, key=lambda each: each.rank)
        return best

    def _neighbours(self, orders: Sequence[WorkerOrder], best: _Decided) -> Iterator[Ways]:
        """The ways with that of one forward changed, then of two, unless they certainly hold too much.

        First those come that fit beside all else that `best` holds at its peak: others may have theirs elsewhere.
        """
        ways, peak = best.ways, best.judged.run.footprint.peak
        rooms = [np.full(len(orders), float(self.limits.saved or 0))] * 2
        if self.limits.bytes is not None:
            others = (peak - most_held(orders, self.kept, ways), best.judged.run.footprint.owned)
            rooms = [(self.limits.bytes - other) * ROOM for other in others]
        allowed = (Way.KEEP, *self.question.ways)
        single = [(int(self.worker[job]), job, way) for job in np.ndindex(*ways.shape) for way in allowed]
        single = [change for change in single if ways[change[1]] != change[2]]
        for number, is_first in product((1, 2), (True, False)):
            for changes in combinations(single, number):
                changed = ways.copy()
                for _, job, way in changes:
                    changed[job] = way
                if number == 2 and changes[0][1] == changes[1][1]:
                    continue
                on = sorted({w for w, _, _ in changes})
                most = [held(orders[w], self.kept, changed[orders[w].forwards]).amount.max() for w in on]
                fits, may = ((most <= room[on]).all() for room in (rooms[0], np.maximum(*rooms)))
                if may and fits == is_first:
                    yield changed

    def _loosened(self, part: float) -> Limits:
        saved, bytes = self.limits.saved, self.limits.bytes
        if np.isinf(part):
            return Limits(self.limits.objective)
        return self.limits._replace(
            saved=None if saved is None else int(np.ceil(part * saved)), bytes=None if bytes is None else part * bytes
        )

    def _worker_orders(self, n: Numbers) -> list[WorkerOrder]:
        return worker_orders(n, self.worker, self.kept.length, self.placed.workers)

    def _capacities(self, n: Numbers, orders: Sequence[WorkerOrder]) -> list[Times]:
        """By worker, the limit minus the memory that this order holds besides saved forwards; and, as other ways may
        have their peaks where less else is held, minus what workers own."""
        if self.limits.bytes is None:
            return [np.full(len(orders), float(self.limits.saved or 0))]
        footprint = simulate(compile_order(self.question, n), self.question.cost, self.question.machine).footprint
        self.others = footprint.peak - most_held(orders, self.kept, np.zeros(self.worker.shape, np.int8))
        return [self.limits.bytes - self.others, (self.limits.bytes - footprint.owned).astype(float)]

    def _with_redone(self, stages: Flags) -> OrderProblem:
        """The problem with the forwards of some stages redone; what whole backwards hold while they run is left out."""
        problem = problem_of(self.placed, self.plain)
        directions, S, batches = self.placed.compute.shape
        d, s = np.divmod(class_nodes(problem), S)
        again = self.kept.saved[s] * stages[s]
        takes = problem.takes - again * (d == F) + again * (d == B)
        length = problem.length.reshape(directions, S, batches).copy()
        length[B] += (self.kept.redo * stages)[:, None]
        return problem._replace(takes=takes, length=length.ravel(), capacity=problem.capacity - self.others)
