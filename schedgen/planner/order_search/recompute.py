"""`search_with_recompute`: an order, and the forwards that are redone so that it keeps to the memory limit.

keep    the best order that redoes nothing, by `search_order`
loosen  the best orders under looser limits; in each, few forwards are redone so that it fits (`redone`); if none can
        fit, each again with every W directly behind its I
redo    the best orders in which whole stages are redone: the stages that loosened orders redo most, or all stages;
        forwards for which there is room are kept after all

The simulator has the last word, and the result is never worse than the order that redoes nothing.

A forward that is redone keeps only its inputs until its backward begins and, while it runs, its graph; RECOMPUTE then
restores what the backward reads. If all forwards keep the same amount, the fewest are redone by choosing, whenever too
much is held, the one whose backward comes last: the others' intervals, from forward to backward, are a maximum
k-colourable subgraph of an interval graph, if a worker saves k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
from schedgen.ir.program import Program
from schedgen.planner.order_search.budget import BUDGET
from schedgen.planner.order_search.compiled_orders import compile_order, judge, numbers_of
from schedgen.planner.order_search.heuristic_orders import heuristic_orders
from schedgen.planner.order_search.placed_problem import kept_by_stage, least_time, placed_jobs, problem_of
from schedgen.planner.order_search.problem import OrderProblem, class_nodes, places
from schedgen.planner.order_search.question import OBJECTIVES, FoundOrder, Limits, NoOrder, Question, Ties, reached
from schedgen.planner.order_search.search_order import search_order
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.arrays import Flags, Numbers, Times
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always

ROOM = 1 + 1e-12  # sums of bytes are rounded
LOOSER = (1.25, 1.5, 2.0, np.inf)  # limits that orders are searched under, as multiples of the real one
TIGHTER = 4  # times that a limit in bytes is tightened, if a schedule holds more besides saved forwards


def search(
    scheme: Scheme, sizes: Sizes, cost: Mapping[str, Amount] | None = None, machine: Machine | None = None, *,
    memory_limit: int | None = None, memory: float | None = None, objective: str = "latency", tied: Ties = (),
    recompute: bool = False, budget: int = BUDGET,
) -> FoundOrder:  # fmt: skip
    """The order of a scheme's jobs that ends first: its `program` and, in the unit of the costs, `value` and `bound`.

    cost          by direction, for all stages or by stage; default: F=1, B=2 or, if backwards are split, all 1
    memory_limit  saved forwards that a worker may hold; or `memory`: bytes that it may need; default: the device's
    objective     what is minimized: latency, or window, the longest from a worker's first job to the end of its last
    tied          stages that share parameters; `recompute`: whether forwards may be redone to keep to the memory
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
    least = machine.network.least_memory(scheme.workers or sizes.workers or 1)
    if memory_limit is None and min(least, memory or math.inf) < math.inf:
        memory = min(least, memory or math.inf)
    question = Question(scheme, sizes, cost, machine, Limits(objective, memory_limit, memory), tied)
    best = (search_with_recompute if recompute else search_order)(question, budget)
    check_compiled(best.program)
    return best


def search_with_recompute(question: Question, budget: int = BUDGET) -> FoundOrder:
    """The best order within the limits and the forwards it redoes; UsageError if none keeps to them.

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
    tries = _Tries(question, least)
    if best is not None and reached(best.value, least):
        return best
    for n in tries.orders(budget):
        for program in tries.fitting(n):
            judged = judge(question, program)
            if judged.fits and (best is None or judged.value < best.value):
                best = FoundOrder(program, judged.value)
    if best is None:
        raise UsageError(
            "the search found no order within the memory limit, even with forwards redone: raise the limit or --budget"
        )
    return best._replace(bound=min(least, best.value), work=work + tries.work)


class _Tries:
    """Orders that redo forwards, for one placement, costs and limits."""

    def __init__(self, question: Question, bound: float) -> None:
        self.question, self.limits, self.bound = question, question.limits, bound
        self.plain = question._replace(cost=without_redo(question.cost))  # if nothing is redone
        self.placed = placed_jobs(question)
        self.worker = self.placed.compute[F].astype(np.int64)
        inputs, saved, half = kept_by_stage(self.placed, question)
        redo = by_stage(redo_duration(question.cost), question.sizes.stages)
        self.kept = Kept(inputs, saved, half, redo, saved if self.limits.bytes is not None else 0 * saved)
        self.work = 0.0
        self.others = np.zeros(self.placed.workers)  # bytes by worker that the last order held besides saved forwards
        self.most: list[Flags] = []  # by order so far, the forwards that it redoes

    def orders(self, budget: int) -> Iterator[Numbers]:
        """Numbers of every job, (D, S, B), that grow along each worker: one array for each order to try."""
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

    def fitting(self, n: Numbers) -> Iterator[Program]:
        """Schedules of an order that redo enough for the limit; more if the simulator finds bytes above the limit."""
        capacity = self._capacity(n)
        for _ in range(1 if self.limits.bytes is None else TIGHTER):
            flags = redone(n, self.worker, self.kept, capacity)
            if flags is None:
                return
            flags = without_needless(flags, n, self.worker, self.kept, capacity)
            self.most.append(flags)
            program = compile_order(self.question, n, redone=flags)
            yield program
            if self.limits.bytes is None:
                return
            over = self._peak(program) - self.limits.bytes
            if over.max() <= 0:
                return
            capacity = capacity - np.maximum(over, 0)

    def _loosened(self, part: float) -> Limits:
        saved, bytes = self.limits.saved, self.limits.bytes
        if np.isinf(part):
            return Limits(self.limits.objective)
        return self.limits._replace(
            saved=None if saved is None else int(np.ceil(part * saved)), bytes=None if bytes is None else part * bytes
        )

    def _capacity(self, n: Numbers) -> Times:
        """By worker, the limit minus the memory that this order holds besides saved forwards."""
        workers = self.placed.workers
        if self.limits.bytes is None:
            return np.full(workers, float(self.limits.saved or 0))
        nothing = np.zeros(self.worker.shape, bool)
        peak = self._peak(compile_order(self.question, n, redone=nothing))
        self.others = peak - most_held_with_redone(n, self.worker, self.kept, nothing, workers)
        return self.limits.bytes - self.others

    def _peak(self, program: Program) -> Numbers:
        return simulate(program, self.question.cost, self.question.machine).footprint.peak

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


class Kept(NamedTuple):
    """What jobs hold, by stage: bytes, or 1 saved forward and nothing else."""

    inputs: Times  # from the forward to the end of the last backward job, redone or not
    saved: Times  # the same if the forward is not redone, else from RECOMPUTE on
    half: Times  # from I to the end of W
    redo: Times  # the time of a RECOMPUTE
    graph: Times  # during the forward alone, if it is redone


def redone(place: Numbers, worker: Numbers, kept: Kept, capacity: Times) -> Flags | None:
    """(S, B): the forwards to redo; None if a worker holds too much even if all those that help are redone.

    place     a number of every job, (D, S, B), that grows along each worker
    worker    by stage and microbatch
    capacity  by worker
    """
    flags = np.zeros(worker.shape, bool)
    for w in range(len(capacity)):
        while True:
            jobs, peaks = _peaks(place, worker, w, kept, flags)
            over = np.flatnonzero(peaks > capacity[w] * ROOM)
            if not len(over):
                break
            at = place[tuple(jobs[:, over[0]])]
            held = (worker == w) & ~flags & (place[F] <= at) & (place[B] > at)
            if not held.any():
                return None
            benefit = (place[B] - at) * (kept.saved / np.maximum(kept.redo, 1e-9))[:, None]
            flags[np.unravel_index(np.argmax(np.where(held, benefit, -1.0)), flags.shape)] = True
    return flags


def without_needless(flags: Flags, place: Numbers, worker: Numbers, kept: Kept, capacity: Times) -> Flags:
    """The flags, except of forwards that can be kept after all, tried from the most expensive to redo."""
    flags = flags.copy()
    order = sorted(np.argwhere(flags).tolist(), key=lambda job: (-kept.redo[job[0]], -place[F, job[0], job[1]]))
    for s, b in order:
        flags[s, b] = False
        w = int(worker[s, b])
        flags[s, b] = (_peaks(place, worker, w, kept, flags)[1] > capacity[w] * ROOM).any()
    return flags


def most_held_with_redone(place: Numbers, worker: Numbers, kept: Kept, flags: Flags, workers: int) -> Times:
    """By worker, the most that its jobs hold at once."""
    return np.array([_peaks(place, worker, w, kept, flags)[1].max(initial=0.0) for w in range(workers)])


def _peaks(place: Numbers, worker: Numbers, w: int, kept: Kept, flags: Flags) -> tuple[Numbers, Times]:
    """The jobs (3, n) of a worker in order, as direction, stage, microbatch; and what is held during each."""
    jobs = np.argwhere(np.broadcast_to(worker == w, place.shape)).T
    jobs = jobs[:, np.argsort(place[tuple(jobs)], kind="stable")]
    d, s, b = jobs
    again = flags[s, b]
    last = d == len(place) - 1
    half = kept.half[s] if len(place) == 3 else np.zeros(len(s))
    takes = np.select([d == F, d == B], [kept.inputs[s] + kept.saved[s] * ~again, half + kept.saved[s] * again], 0.0)
    gives = np.where(last, kept.inputs[s] + kept.saved[s] + half, 0.0)
    alone = kept.graph[s] * (again & (d == F))
    return jobs, np.cumsum(takes) - np.concatenate([[0.0], np.cumsum(gives)[:-1]]) + alone
