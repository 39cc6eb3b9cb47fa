"""Greedy: of the jobs that can start earliest, a free worker takes the one with the smallest n.

This is work-conserving, the simulator of Rahimi 2025. A forward that a limit (cap, memory) holds back waits for the end
of a backward that makes room. A redone forward is saved only during its backward: unless backwards are split, all
redone forwards of a worker in flight together take the memory of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.job_graph import JobGraph, cycle, may_start, wait_arrays
from schedgen.util.arrays import Flags, Ints, Numbers, Times
from schedgen.util.errors import UsageError
from schedgen.util.heap import least_leaf, pop, push, set_leaf, time_of
from schedgen.util.jit import kernel


def greedy(
    graph: JobGraph,
    worker: Ints,
    n: NDArray[Any],
    length: Times,
    caps: Sequence[int] | Numbers | None = None,
    memory: int | None = None,
    redone: Flags | None = None,
) -> Times:
    """The start time of each job; UsageError if a limit blocks the schedule.

    caps    by stage, the most microbatches in flight on a worker
    memory  the most saved forwards on a worker
    redone  by forward, whether it is saved only while its backward runs; all of these on a worker count as one
    """
    jobs = len(worker)
    # The place of each job when sorted by n; jobs of equal n are sorted by number.
    by_rank = np.argsort(n, kind="stable")
    rank = np.empty(jobs, np.int64)
    rank[by_rank] = np.arange(jobs)
    limits = np.full(graph.stages, jobs, np.int64) if caps is None else np.array(caps, np.int64)
    most = jobs if memory is None else memory
    limited = most < jobs or bool(limits.min() < jobs)
    start, queues, waits = np.full(jobs, -1.0), _queues(graph, worker, limited, redone), wait_arrays(graph)
    _greedy.sized(16 * jobs)(
        worker, rank, by_rank, *waits, length, graph.stages, graph.microbatches, limits, most, queues, start
    )
    if (start < 0).any():
        what = "cap" if memory is None else "memory limit" if caps is None else "cap and memory limit"
        raise UsageError(f"{what} stops the schedule: {cycle(graph, worker, start, np.full(jobs, -1))}")
    return start


class _Queues(NamedTuple):
    """The queues of all workers, one after another: worker v's heaps begin at base[v].

    With limits, forwards whose inputs are ready are held in a heap for each kind: a worker, a stage, and redone or not.
    The forward of a kind with the smallest n starts first. Worker v's kinds are first_kind[v] to first_kind[v + 1] - 1,
    and the heap of kind k begins at kind_base[k].
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
    saved: Numbers  # forwards in flight: (workers, 2), kept and redone ...
    in_flight: Numbers  # ... and by stage, (workers, stages)
    ready: Times  # [job]: when the job can start; [jobs + job]: when it makes room for a forward
    free_at: Times
    tree: Times  # leaf by worker: when it can start a job


def _queues(graph: JobGraph, worker: Ints, limited: bool, redone: Flags | None) -> _Queues:
    """Empty queues; if `limited`, large enough to hold also the entries of jobs that make room for forwards."""
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


@kernel
def _greedy(
    worker: Ints, rank: Numbers, by_rank: Numbers, waits: Numbers, first: Numbers, after: Numbers, length: Times,
    stages: int, batches: int, caps: Numbers, memory: int, queues: _Queues, start: Times,
) -> None:  # fmt: skip
    """Fill `start` with the start time of each job; jobs that a limit blocks permanently keep -1.

    A tree over the workers finds the worker v that can start a job first. The room that a backward makes for forwards,
    under a cap or a memory limit, is an item of its own in `later`: `jobs` + the backward's number.
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
        set_leaf(tree, leaves + v, 0.0 if later_size[v] else inf)
    while tree[1] < inf:
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
                if may_start(other, end, ready, waits):
                    u = worker[other]
                    push(later[base[u] : base[u + 1]], later_size[u], rank[other], ready, by_rank)
                    later_size[u] += 1
                    if u != v:
                        set_leaf(tree, leaves + u, min(tree[leaves + u], max(free_at[u], ready[other])))
        key = inf
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
