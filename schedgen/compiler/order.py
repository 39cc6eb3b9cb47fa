"""When every job starts: each worker runs one job at a time, in the order that n says.

greedy   work-conserving, the simulator of Rahimi 2025: of the jobs that can start earliest, a free worker takes the
         one with the smallest n. A forward that a limit (cap, memory) holds back waits until a backward makes room.
         Redone forwards are saved only during their backwards: unless these are split, all of them share one place.
strict   each worker runs its jobs in increasing n.

Messages take no time here (Rahimi 2025, section "Latency, network, and memory usage"). Arrays by job are flat over
(direction, stage, microbatch), as are the resulting start times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.cost import redo_duration
from schedgen.ir.instructions import DIRECTIONS, B, Flags, Ints, Numbers, Times
from schedgen.ir.job_graph import JobGraph
from schedgen.util.errors import UsageError
from schedgen.util.heap import least_leaf, pop, push, set_leaf, time_of
from schedgen.util.jit import kernel
from schedgen.util.sort import stable_order


def order(placed: PlacedScheme) -> Times:
    """When every job of a refined scheme starts; UsageError if n, caps or the memory limit block the schedule."""
    graph, (_, stages, batches) = placed.job_graph, placed.compute.shape
    worker, n, length = placed.compute.ravel(), placed.n.ravel(), _lengths(placed)
    if placed.scheme.mode == "greedy":
        one_by_one = placed.redone.ravel() if len(placed.compute) == 2 else None  # split, they may run I, I, W, W
        return greedy(graph, worker, n, length, placed.caps, placed.options.memory_limit, one_by_one)
    delayed = np.zeros(len(length), bool)
    delayed[: stages * batches] = placed.delayed_send.ravel()
    return strict(graph, worker, n, length, delayed)


def _lengths(placed: PlacedScheme) -> Times:
    """How long each job takes: an unsplit I includes its W, and a backward the forward that it redoes."""
    length = np.empty(placed.compute.shape)
    times = [placed.cost[direction] for direction in DIRECTIONS[len(length)]]
    length[:] = np.array(times, np.float64)[:, None, None]
    if placed.unsplit_backward.any():
        length[:, placed.unsplit_backward] = [[placed.cost["F"]], [placed.cost["I"] + placed.cost["W"]], [0.0]]
    if placed.redone.any():
        length[B, placed.redone] += redo_duration(placed.cost)
    return length.ravel()


def greedy(
    graph: JobGraph,
    worker: Ints,
    n: NDArray[Any],
    length: Times,
    caps: Sequence[int] | Numbers | None = None,
    memory: int | None = None,
    redone: Flags | None = None,
) -> Times:
    """When each job starts.

    caps    by stage, the most microbatches in flight on a worker
    memory  the most saved forwards on a worker; `redone`, by forward: saved one at a time, while its backward runs
    """
    jobs = len(worker)
    # One number that sorts jobs by n and then by job, so that equal n are settled too.
    by_rank = np.argsort(n, kind="stable")
    rank = np.empty(jobs, np.int64)
    rank[by_rank] = np.arange(jobs)
    limits = np.full(graph.stages, jobs, np.int64) if caps is None else np.array(caps, np.int64)
    most = jobs if memory is None else memory
    limited = most < jobs or bool(limits.min() < jobs)
    start, queues = np.full(jobs, -1.0), _queues(graph, worker, limited, redone)
    _greedy.sized(16 * jobs)(
        worker, rank, by_rank, *_edges(graph), length, graph.stages, graph.microbatches, limits, most, queues, start
    )
    if (start < 0).any():
        what = "cap" if memory is None else "memory limit" if caps is None else "cap and memory limit"
        raise UsageError(f"{what} stops the schedule: {_cycle(graph, worker, start, np.full(jobs, -1))}")
    return start


class _Queues(NamedTuple):
    """The queues of all workers, one after another: worker v's heaps begin at base[v].

    With limits, forwards that may start are held by kind: by worker, by stage, and redone or not. Of each kind, a limit
    lets the one with the smallest n through first. Worker v's kinds are first_kind[v] to first_kind[v + 1] - 1, and
    the heap of kind k begins at kind_base[k].
    """

    limited: bool
    base: Numbers
    now: Numbers  # a heap of jobs that may start now, by rank
    later: Numbers  # a heap of jobs that may start later, by time and rank
    now_size: Numbers
    later_size: Numbers
    kind_of: Numbers  # by forward
    first_kind: Numbers
    stage_of: Numbers  # by kind, as are the next four
    redone: Numbers  # 1: redone
    kind_base: Numbers
    held: Numbers  # a heap of forwards, by rank
    held_size: Numbers
    saved: Numbers  # forwards in flight: (workers, 2), those that are kept and those that are redone ...
    in_flight: Numbers  # ... and by stage, (workers, stages)
    ready: Times  # by job, and after all jobs by the room that each makes: when it is there
    free_at: Times
    tree: Times  # leaf by worker: when it can start a job


def _queues(graph: JobGraph, worker: Ints, limited: bool, redone: Flags | None) -> _Queues:
    """Empty queues; `limited`: they also have room for entries about memory that jobs free."""
    jobs, workers, forwards = len(worker), int(worker.max()) + 1, graph.stages * graph.microbatches
    most = np.bincount(worker, minlength=workers)
    kind = np.zeros(0, np.int64)
    if limited:
        most += 2 * np.bincount(worker[:forwards], minlength=workers)
        kind = 2 * (worker[:forwards].astype(np.int64) * graph.stages + np.arange(forwards) // graph.microbatches)
        kind += 0 if redone is None else redone
    kinds, kind_of, counts = np.unique(kind, return_inverse=True, return_counts=True)
    now, later = np.empty((2, int(most.sum())), np.int64)
    now_size, later_size = np.zeros((2, workers), np.int64)
    first_kind = np.searchsorted(kinds, 2 * graph.stages * np.arange(workers + 1))
    saved, in_flight = np.zeros((workers, 2), np.int64), np.zeros((workers, graph.stages), np.int64)
    return _Queues(
        limited, np.append(0, np.cumsum(most)), now, later, now_size, later_size, kind_of, first_kind,
        kinds // 2 % graph.stages, kinds % 2, np.append(0, np.cumsum(counts)), np.empty(len(kind), np.int64),
        np.zeros(len(kinds), np.int64), saved, in_flight, np.zeros(2 * jobs), np.zeros(workers),
        np.full(2 << (workers - 1).bit_length(), np.inf),
    )  # fmt: skip


def strict(graph: JobGraph, worker: Ints, n: NDArray[Any], length: Times, delayed_send: Flags | None = None) -> Times:
    """When each job starts. `delayed_send`: by job, whether its output leaves only after the worker's next job."""
    order = by_worker(worker, n)
    same_worker = worker[order[:-1]] == worker[order[1:]]
    former, latter = order[:-1][same_worker], order[1:][same_worker]
    for i in np.flatnonzero(n[former] == n[latter])[:1]:
        a, b = int(former[i]), int(latter[i])
        raise UsageError(
            f"strict n must differ within a worker, but {graph.job_name(a)} and {graph.job_name(b)} "
            f"on worker {worker[a]} both have n = {n[a]}"
        )
    following, previous = np.full((2, len(worker)), -1)  # on the same worker; -1: none
    following[former], previous[latter] = latter, former
    waits, first_after, after = _edges(graph)
    waits[latter] += 1
    delayed = np.zeros(len(worker), bool) if delayed_send is None else delayed_send & (following >= 0)
    ready = np.flatnonzero(waits == 0)
    stack = np.concatenate([ready, np.empty(len(worker) - len(ready), np.int64)])
    run = _strict.sized(4 * len(worker))
    start: Times = run(
        following, previous, delayed, waits, first_after, after, length, graph.microbatches, stack, len(ready)
    )
    if (start < 0).any():
        raise UsageError(f"n stops the schedule: {_cycle(graph, worker, start, previous)}")
    return start


def _edges(graph: JobGraph) -> tuple[Numbers, Numbers, Numbers]:
    """How many jobs each job waits for; and the successors of node k, after[first[k] : first[k + 1]]."""
    waits = np.repeat(np.array([len(nodes) for nodes in graph.pred], np.int64), graph.microbatches)
    first = np.cumsum([0, *(len(nodes) for nodes in graph.succ)])
    return waits, first, np.array([node for nodes in graph.succ for node in nodes], np.int64)


def by_worker(worker: Ints, key: NDArray[Any]) -> Numbers:
    """The jobs sorted by worker and then by key."""
    order = np.argsort(key, kind="stable")
    return order[stable_order(worker[order])]


@kernel
def _strict(
    following: Numbers, previous: Numbers, delayed: Flags, waits: Numbers, first: Numbers, after: Numbers,
    length: Times, batches: int, stack: Numbers, top: int,
) -> Times:  # fmt: skip
    """Longest paths; -1 for jobs that never start. Uses up `waits`; stack[:top] are the jobs that wait for nothing."""
    start = np.zeros(len(following))
    while top:
        top -= 1
        job = stack[top]
        end = start[job] + length[job]
        # Now the output of the job leaves, unless it is delayed, and that of the job before, if it is delayed.
        for sender in (job, previous[job]):
            if sender < 0 or delayed[sender] != (sender != job):
                continue
            node = sender // batches
            for k in range(first[node], first[node + 1]):
                other = after[k] * batches + sender % batches
                start[other] = max(start[other], end)
                waits[other] -= 1
                if waits[other] == 0:
                    stack[top] = other
                    top += 1
        other = following[job]
        if other >= 0:
            start[other] = max(start[other], end)
            waits[other] -= 1
            if waits[other] == 0:
                stack[top] = other
                top += 1
    for job in range(len(waits)):
        if waits[job]:
            start[job] = -1.0
    return start


@kernel
def _greedy(
    worker: Ints, rank: Numbers, by_rank: Numbers, waits: Numbers, first: Numbers, after: Numbers, length: Times,
    stages: int, batches: int, caps: Numbers, memory: int, queues: _Queues, start: Times,
) -> None:  # fmt: skip
    """Fill in when each job starts; jobs that a limit holds back for ever keep -1.

    A tree over the workers finds the worker v that can start a job first. The room that a backward makes for forwards
    is an item of its own in `later`, numbered from `jobs` up.
    """
    base, now, later, now_size, later_size = queues.base, queues.now, queues.later, queues.now_size, queues.later_size
    saved, in_flight, ready, free_at, tree = queues.saved, queues.in_flight, queues.ready, queues.free_at, queues.tree
    jobs, workers, leaves = len(worker), len(free_at), len(tree) // 2
    last = jobs // (stages * batches) - 1  # the direction that ends a microbatch on a stage
    no_time = start[:0]
    for job in range(jobs):
        if waits[job] == 0:
            v = worker[job]
            push(later[base[v] : base[v + 1]], later_size[v], rank[job], ready, by_rank)
            later_size[v] += 1
    for v in range(workers):
        set_leaf(tree, leaves + v, 0.0 if later_size[v] else np.inf)
    while tree[1] < np.inf:
        v, time = least_leaf(tree, leaves), tree[1]
        now_v, later_v = now[base[v] : base[v + 1]], later[base[v] : base[v + 1]]
        while later_size[v] and time_of(later_v[0], ready, by_rank) <= time:
            item = later_v[0]
            pop(later_v, later_size[v], ready, by_rank)
            later_size[v] -= 1
            if item >= jobs:
                job = item - jobs
                s, forward = job // batches % stages, job % (stages * batches)
                if job // batches // stages == 1:
                    in_flight[v, s] -= 1
                if job // batches // stages == last:
                    saved[v, queues.redone[queues.kind_of[forward]]] -= 1
            elif queues.limited and by_rank[item] < stages * batches:
                kind = queues.kind_of[by_rank[item]]
                push(queues.held[queues.kind_base[kind] :], queues.held_size[kind], item, no_time, by_rank)
                queues.held_size[kind] += 1
            else:
                push(now_v, now_size[v], item, no_time, by_rank)
                now_size[v] += 1
        kind, job = _first_kind(v, caps, memory, queues), -1
        if kind >= 0 and not (now_size[v] and now_v[0] < queues.held[queues.kind_base[kind]]):
            held = queues.held[queues.kind_base[kind] :]
            job = by_rank[held[0]]
            pop(held, queues.held_size[kind], no_time, by_rank)
            queues.held_size[kind] -= 1
            in_flight[v, queues.stage_of[kind]] += 1
            saved[v, queues.redone[kind]] += 1
        elif now_size[v]:
            job = by_rank[now_v[0]]
            pop(now_v, now_size[v], no_time, by_rank)
            now_size[v] -= 1
        if job >= 0:
            node = job // batches
            d, s, b = node // stages, node % stages, job % batches
            start[job] = time
            free_at[v] = time + length[job]
            end = free_at[v]
            if d and queues.limited:
                u = worker[s * batches + b]  # where its forward ran
                ready[jobs + job] = end
                push(later[base[u] : base[u + 1]], later_size[u], jobs + job, ready, by_rank)
                later_size[u] += 1
                if u != v:
                    set_leaf(tree, leaves + u, min(tree[leaves + u], max(free_at[u], end)))
            for k in range(first[node], first[node + 1]):
                other = after[k] * batches + b
                ready[other] = max(ready[other], end)
                waits[other] -= 1
                if waits[other] == 0:
                    u = worker[other]
                    push(later[base[u] : base[u + 1]], later_size[u], rank[other], ready, by_rank)
                    later_size[u] += 1
                    if u != v:
                        set_leaf(tree, leaves + u, min(tree[leaves + u], max(free_at[u], ready[other])))
        key = np.inf
        if now_size[v] or _first_kind(v, caps, memory, queues) >= 0:
            key = free_at[v]
        elif later_size[v]:
            key = max(free_at[v], time_of(later_v[0], ready, by_rank))
        set_leaf(tree, leaves + v, key)


@kernel
def _first_kind(v: int, caps: Numbers, memory: int, queues: _Queues) -> int:
    """The kind of the forward with the smallest n that worker v's limits let through; -1 if there is none."""
    found = -1
    for kind in range(queues.first_kind[v], queues.first_kind[v + 1]):
        s, redone = queues.stage_of[kind], queues.redone[kind]
        taken = queues.saved[v, 0] + (0 if redone else min(queues.saved[v, 1], 1))
        if queues.held_size[kind] and queues.in_flight[v, s] < caps[s] and taken < memory:
            item = queues.held[queues.kind_base[kind]]
            if found < 0 or item < queues.held[queues.kind_base[found]]:
                found = kind
    return found


def _cycle(graph: JobGraph, worker: Ints, start: Times, previous: Numbers) -> str:
    """Jobs that wait for one another, in words, found from a job that never started.

    `previous`: by job, the one that its worker must run before it; -1: none.
    """
    job = int(np.flatnonzero(start < 0)[0])
    path: dict[int, int] = {}
    words: list[str] = []
    while job not in path:
        path[job] = len(path)
        node, b = divmod(job, graph.microbatches)
        before = [*(p * graph.microbatches + b for p in graph.pred[node]), int(previous[job])]
        blocked = [other for other in before if other >= 0 and start[other] < 0]
        if not blocked:  # a limit holds it back: it waits for the backward of a microbatch in flight
            blocked = _in_flight(graph, worker, start, job)
        words.append(f"{graph.job_name(job)} on worker {worker[job]} waits for {graph.job_name(blocked[0])}")
        job = blocked[0]
    return ", ".join(words[path[job] :])


def _in_flight(graph: JobGraph, worker: Ints, start: Times, job: int) -> list[int]:
    """The last backwards of the forwards that have run on a blocked job's worker, those of its stage first."""
    forwards = graph.stages * graph.microbatches
    lasts = np.arange(forwards) + (graph.directions - 1) * forwards
    in_flight = np.flatnonzero((worker[:forwards] == worker[job]) & (start[:forwards] >= 0) & (start[lasts] < 0))
    same = in_flight // graph.microbatches == job // graph.microbatches
    return [int(lasts[forward]) for forward in [*in_flight[same], *in_flight[~same]]]
