"""Which job each worker runs next: `greedy` or `strict`.

Both take the graph, the worker and n of every job (flat, indexed by job) and
the duration of each direction, and return when every job starts. Messages
take no time here (the seed, section "Latency, network, and memory usage").

greedy   work-conserving, the seed's simulator: among the jobs that can start
         earliest, a free worker takes the one with the smallest n. With
         cap(s), a forward waits while cap(s) microbatches of its stage are in
         flight on its worker.
strict   each worker runs its jobs exactly in increasing n.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.job_graph import Graph
from schedgen.ir.instructions import Ints
from schedgen.util.errors import UsageError
from schedgen.util.heap import pop, push, set_leaf, time_of
from schedgen.util.jit import kernel

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]


def greedy(
    graph: Graph,
    worker: Ints,
    n: NDArray[Any],
    length: Times,
    caps: list[int] | None = None,
    memory: int | None = None,
) -> Times:
    """When each job starts, with durations `length[job]`.

    `caps[s]`: the most microbatches in flight on a stage, for each worker that
    computes it; `memory`: the most saved forwards on a worker.
    """
    jobs = len(worker)
    # One number that sorts jobs by n and then by job, so that equal n are settled too.
    by_rank = np.lexsort((np.arange(jobs), n))
    rank = np.empty(jobs, np.int64)
    rank[by_rank] = np.arange(jobs)
    forward = worker[: graph.stages * graph.microbatches]
    limits = np.full(graph.stages, jobs if caps is None else 0, np.int64)
    if caps is not None:
        limits[:] = caps
    start = _greedy.sized(jobs)(
        worker.astype(np.int64),
        forward.astype(np.int64),
        rank,
        by_rank,
        *_arrays(graph),
        length,
        graph.stages,
        graph.microbatches,
        limits,
        jobs if memory is None else memory,
    )
    if (start < 0).any():
        what = "cap" if memory is None else "memory limit" if caps is None else "cap and memory limit"
        raise UsageError(f"{what} stops the schedule: {_circle(graph, worker, start, None)}")
    return start


def strict(
    graph: Graph, worker: Ints, n: NDArray[Any], length: Times, paired: NDArray[np.bool_] | None = None
) -> Times:
    """When each job starts; `paired[job]`: others have what it gives only when the job behind it has ended too."""
    order = by_worker(worker, n)
    within = worker[order][1:] == worker[order][:-1]
    same = np.flatnonzero(within & (n[order][1:] == n[order][:-1]))
    if len(same):
        first, second = (graph.words(int(order[same[0] + k])) for k in (0, 1))
        raise UsageError(
            f"strict n must differ within a worker, but {first} and {second} "
            f"on worker {worker[order[same[0]]]} both have n = {n[order[same[0]]]}"
        )
    # The job that follows on the same worker; -1 after the last.
    follows = np.full(len(worker), -1)
    follows[order[:-1][within]] = order[1:][within]
    ahead = np.full(len(worker), -1)
    ahead[order[1:][within]] = order[:-1][within]
    waits, first_after, after = _arrays(graph)
    waits[order[1:][within]] += 1
    late = np.zeros(len(worker), bool) if paired is None else paired & (follows >= 0)
    start = _strict.sized(len(worker))(follows, ahead, late, waits, first_after, after, length, graph.microbatches)
    if (start < 0).any():
        raise UsageError(f"n stops the schedule: {_circle(graph, worker, start, order)}")
    return start


def _arrays(graph: Graph) -> tuple[Numbers, Numbers, Numbers]:
    """How many jobs each job waits for; and the nodes behind node k, after[first[k]:first[k + 1]]."""
    waits = np.repeat(np.array([len(before) for before in graph.pred], np.int64), graph.microbatches)
    first = np.cumsum([0, *(len(behind) for behind in graph.succ)])
    return waits, first, np.array([node for behind in graph.succ for node in behind], np.int64)


def by_worker(worker: Ints, key: NDArray[Any]) -> Numbers:
    """The jobs sorted by worker and then by key."""
    order = np.argsort(key, kind="stable")
    few = len(worker) == 0 or worker.max() < 2**16  # numpy sorts 16 bits in linear time
    mine = worker[order].astype(np.uint16) if few else worker[order]
    return order[np.argsort(mine, kind="stable")]


@kernel
def _strict(
    follows: Numbers, ahead: Numbers, late: NDArray[np.bool_], waits: Numbers, first: Numbers, after: Numbers,
    length: Times, batches: int,
) -> Times:  # fmt: skip
    """Longest paths; -1 for jobs that never start. Uses up `waits`."""
    start = np.zeros(len(follows))
    ready = np.flatnonzero(waits == 0)
    stack = np.empty(len(follows), np.int64)
    top = len(ready)
    stack[:top] = ready
    while top:
        top -= 1
        job = stack[top]
        end = start[job] + length[job]
        # What the job gives, or the one before it whose results leave together with its own; then its worker.
        for given in (job, ahead[job]):
            if given < 0 or late[given] != (given != job):
                continue
            node = given // batches
            for k in range(first[node], first[node + 1]):
                other = after[k] * batches + given % batches
                start[other] = max(start[other], end)
                waits[other] -= 1
                if waits[other] == 0:
                    stack[top] = other
                    top += 1
        other = follows[job]
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
    worker: Numbers,
    forward: Numbers,
    rank: Numbers,
    by_rank: Numbers,
    waits: Numbers,
    first: Numbers,
    after: Numbers,
    length: Times,
    stages: int,
    batches: int,
    caps: Numbers,
    memory: int,
) -> Times:
    """When each job starts; -1 for those that a limit holds back for ever.

    Each worker has two heaps in one segment of an array: jobs that may start
    now, by rank, and jobs that may start later, by time and rank. A tree over
    the workers finds the one that can start a job first. Forwards beyond a
    limit lie in `held`; a backward that makes room is an item of its own in
    `later`, numbered from `jobs` up, and lets them try again.
    """
    jobs, workers = len(worker), worker.max() + 1
    limited = memory < jobs or caps.min() < jobs
    last = jobs // (stages * batches) - 1  # the direction that ends a microbatch on a stage
    start = np.full(jobs, -1.0)
    ready = np.zeros(2 * jobs)  # of jobs, and of the room they make
    free = np.zeros(workers)
    base = np.zeros(workers + 1, np.int64)
    for job in range(jobs):
        base[worker[job] + 1] += 1
        if limited and job < len(forward):
            base[worker[job] + 1] += 2
    base = np.cumsum(base)
    now, later, held = np.empty(base[-1], np.int64), np.empty(base[-1], np.int64), np.empty(base[-1], np.int64)
    now_size, later_size = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    held_size, saved = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    flying = np.zeros((workers, stages), np.int64)
    none = np.zeros(0)
    for job in range(jobs):
        if waits[job] == 0:
            v = worker[job]
            push(later[base[v] : base[v + 1]], later_size[v], rank[job], ready, by_rank)
            later_size[v] += 1
    leaves = 1
    while leaves < workers:
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)  # tree[leaves + v]: when worker v can start a job
    for v in range(workers):
        set_leaf(tree, leaves + v, 0.0 if later_size[v] else np.inf)
    while tree[1] < np.inf:
        place = 1
        while place < leaves:
            place = 2 * place if tree[2 * place] <= tree[2 * place + 1] else 2 * place + 1
        v, time = place - leaves, tree[1]
        mine_now, mine_later = now[base[v] : base[v + 1]], later[base[v] : base[v + 1]]
        while later_size[v] and time_of(mine_later[0], ready, by_rank) <= time:
            moved = mine_later[0]
            pop(mine_later, later_size[v], ready, by_rank)
            later_size[v] -= 1
            if moved < jobs:
                push(mine_now, now_size[v], moved, none, by_rank)
                now_size[v] += 1
                continue
            node = (moved - jobs) // batches
            if node // stages == 1:
                flying[v, node % stages] -= 1
            if node // stages == last:
                saved[v] -= 1
            while held_size[v]:
                held_size[v] -= 1
                push(mine_now, now_size[v], held[base[v] + held_size[v]], none, by_rank)
                now_size[v] += 1
        job = -1
        while now_size[v]:
            chosen = mine_now[0]
            pop(mine_now, now_size[v], none, by_rank)
            now_size[v] -= 1
            job = by_rank[chosen]
            s = job // batches % stages
            if job // batches >= stages or (flying[v, s] < caps[s] and saved[v] < memory):
                break
            held[base[v] + held_size[v]] = chosen
            held_size[v] += 1
            job = -1
        if job >= 0:
            node = job // batches
            d, s, b = node // stages, node % stages, job % batches
            start[job] = time
            free[v] = time + length[job]
            end = free[v]
            if d == 0:
                flying[v, s] += 1
                saved[v] += 1
            elif limited:
                u = forward[s * batches + b]
                ready[jobs + job] = end
                push(later[base[u] : base[u + 1]], later_size[u], jobs + job, ready, by_rank)
                later_size[u] += 1
                if u != v and now_size[u] == 0:
                    set_leaf(tree, leaves + u, max(free[u], time_of(later[base[u]], ready, by_rank)))
            for k in range(first[node], first[node + 1]):
                other = after[k] * batches + b
                ready[other] = max(ready[other], end)
                waits[other] -= 1
                if waits[other] == 0:
                    u = worker[other]
                    push(later[base[u] : base[u + 1]], later_size[u], rank[other], ready, by_rank)
                    later_size[u] += 1
                    if u != v and now_size[u] == 0:
                        set_leaf(tree, leaves + u, max(free[u], time_of(later[base[u]], ready, by_rank)))
        key = np.inf
        if now_size[v]:
            key = free[v]
        elif later_size[v]:
            key = max(free[v], time_of(mine_later[0], ready, by_rank))
        set_leaf(tree, leaves + v, key)
    return start


def _circle(graph: Graph, worker: Ints, start: Times, order: Numbers | None) -> str:
    """Name jobs that wait for each other, walking back from one that never started.

    `order`: the jobs sorted by worker and place, where that order is strict.
    """
    ahead = np.full(len(worker), -1)
    if order is not None:
        within = worker[order][1:] == worker[order][:-1]
        ahead[order[1:][within]] = order[:-1][within]
    job = int(np.flatnonzero(start < 0)[0])
    path: list[int] = []
    words: list[str] = []
    while job not in path:
        path.append(job)
        node, b = divmod(job, graph.microbatches)
        blocked = [p * graph.microbatches + b for p in graph.pred[node]]
        blocked = [other for other in [*blocked, int(ahead[job])] if other >= 0 and start[other] < 0]
        if not blocked:  # a limit holds it back: it waits for the backward of a microbatch in flight
            blocked = _in_flight(graph, worker, start, job)
        words.append(f"{graph.words(job)} on worker {worker[job]} waits for {graph.words(blocked[0])}")
        job = blocked[0]
    return ", ".join(words[path.index(job) :])


def _in_flight(graph: Graph, worker: Ints, start: Times, job: int) -> list[int]:
    """The last backwards of the forwards that ran on a held job's worker, those of its stage first."""
    forwards = graph.stages * graph.microbatches
    lasts = np.arange(forwards) + (graph.directions - 1) * forwards
    open_ones = np.flatnonzero((worker[:forwards] == worker[job]) & (start[:forwards] >= 0) & (start[lasts] < 0))
    same = open_ones // graph.microbatches == job // graph.microbatches
    return [int(lasts[one]) for one in [*open_ones[same], *open_ones[~same]]]
