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

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from schedgen.errors import UsageError
from schedgen.graph import Graph
from schedgen.program import B, F, Ints

Times = NDArray[np.float64]


def greedy(
    graph: Graph, worker: Ints, n: NDArray[np.generic], cost: tuple[float, ...], caps: list[int] | None = None
) -> Times:
    jobs, S, batches = len(worker), graph.stages, graph.microbatches
    # One number that sorts jobs by n and then by job, so that equal n are settled too.
    ranks = np.empty(jobs, np.int64)
    ranks[np.lexsort((np.arange(jobs), n))] = np.arange(jobs)
    by_rank = np.argsort(ranks).tolist()
    rank, place = ranks.tolist(), worker.tolist()
    waits = np.repeat([len(before) for before in graph.pred], batches).tolist()
    ready = [0.0] * jobs
    start = [-1.0] * jobs
    workers = max(place) + 1
    free = [0.0] * workers
    # Per worker: jobs that may start now, by rank, and jobs that may start later, by time.
    now: list[list[int]] = [[] for _ in range(workers)]
    later: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
    # Under a cap: forwards held back, and when microbatches in flight leave, per (worker, stage).
    held: dict[tuple[int, int], list[int]] = {}
    flying: dict[tuple[int, int], int] = {}
    for job in np.flatnonzero(np.repeat([not before for before in graph.pred], batches)).tolist():
        later[place[job]].append((0.0, rank[job]))
    for queue in later:
        heapify(queue)
    events = [(0.0, v) for v in range(workers) if later[v]]
    done = 0
    while events:
        time, v = heappop(events)
        if time < free[v]:
            if now[v] or later[v]:
                heappush(events, (free[v], v))
            continue
        while later[v] and later[v][0][0] <= time:
            heappush(now[v], heappop(later[v])[1])
        job = -1
        while now[v]:
            job = by_rank[heappop(now[v])]
            d, s = divmod(job // batches, S)
            if caps is not None and d == F:
                if flying.get((v, s), 0) >= caps[s]:
                    heappush(held.setdefault((v, s), []), rank[job])
                    job = -1
                    continue
                flying[v, s] = flying.get((v, s), 0) + 1
            break
        if job < 0:
            if later[v]:
                heappush(events, (later[v][0][0], v))
            continue
        start[job] = time
        done += 1
        node, b = divmod(job, batches)
        d, s = divmod(node, S)
        end = free[v] = time + cost[d]
        if now[v] or later[v]:
            heappush(events, (end, v))
        if caps is not None and d == B:
            owner = place[(F * S + s) * batches + b]
            flying[owner, s] -= 1
            for waiting in held.pop((owner, s), []):
                heappush(later[owner], (end, waiting))
                heappush(events, (end, owner))
        for after in graph.succ[node]:
            other = after * batches + b
            waits[other] -= 1
            if end > ready[other]:
                ready[other] = end
            if not waits[other]:
                u = place[other]
                heappush(later[u], (ready[other], rank[other]))
                heappush(events, (ready[other], u))
    if done < jobs:
        raise UsageError(f"cap stops the schedule: {_circle(graph, worker, np.asarray(start), None)}")
    return np.asarray(start)


def strict(graph: Graph, worker: Ints, n: NDArray[np.generic], cost: tuple[float, ...]) -> Times:
    jobs, S, batches = len(worker), graph.stages, graph.microbatches
    order = np.lexsort((n, worker))
    same = np.flatnonzero((worker[order][1:] == worker[order][:-1]) & (n[order][1:] == n[order][:-1]))
    if len(same):
        first, second = (graph.words(int(order[same[0] + k])) for k in (0, 1))
        raise UsageError(
            f"strict n must differ within a worker, but {first} and {second} "
            f"on worker {worker[order[same[0]]]} both have n = {n[order[same[0]]]}"
        )
    # The job that follows on the same worker; -1 after the last.
    follows = np.full(jobs, -1)
    within = worker[order][1:] == worker[order][:-1]
    follows[order[:-1][within]] = order[1:][within]
    waits = np.repeat([len(before) for before in graph.pred], batches)
    waits[order[1:][within]] += 1
    next_on, counts = follows.tolist(), waits.tolist()
    start = [0.0] * jobs
    open_jobs = np.flatnonzero(waits == 0).tolist()
    finished = np.zeros(jobs, bool)
    while open_jobs:
        job = open_jobs.pop()
        finished[job] = True
        node, b = divmod(job, batches)
        end = start[job] + cost[node // S]
        others = [after * batches + b for after in graph.succ[node]]
        if next_on[job] >= 0:
            others.append(next_on[job])
        for other in others:
            if end > start[other]:
                start[other] = end
            counts[other] -= 1
            if not counts[other]:
                open_jobs.append(other)
    times = np.where(finished, start, -1.0)
    if not finished.all():
        raise UsageError(f"n stops the schedule: {_circle(graph, worker, times, order)}")
    return times


def _circle(graph: Graph, worker: Ints, start: Times, order: NDArray[np.int64] | None) -> str:
    """Name jobs that wait for each other, walking back from one that never started."""
    before = np.full(len(worker), -1)
    if order is not None:
        within = worker[order][1:] == worker[order][:-1]
        before[order[1:][within]] = order[:-1][within]
    job = int(np.flatnonzero(start < 0)[0])
    path: list[int] = []
    words: list[str] = []
    while job not in path:
        path.append(job)
        node, b = divmod(job, graph.microbatches)
        waiting = [p * graph.microbatches + b for p in graph.pred[node]]
        blocked = [other for other in waiting if start[other] < 0]
        if before[job] >= 0 and start[before[job]] < 0:
            blocked.append(int(before[job]))
        if not blocked:
            return f"{graph.words(job)} on worker {worker[job]} never starts"
        words.append(f"{graph.words(job)} on worker {worker[job]} waits for {graph.words(blocked[0])}")
        job = blocked[0]
    return ", ".join(words[path.index(job) :])
