"""Lower bounds on the latency of a schedule, whatever the order of its jobs.

work           the busiest worker's jobs, one after another
critical_path  the forwards and backwards of one microbatch, one after another
memory         Each forward's saved activations are alive until its backward has ended, unless it is redone. The sum of
               these times over a worker's jobs fits into the latency times the worker's peak of activations. This is
               the theorem of Rahimi 2025 (throughput <= M / S, for identical stages in a chain, one unit of memory
               each, messages hidden) with the jobs' own durations, for any DAG of stages and for each worker.
ends           for each worker: its jobs, and the idle time at its beginning and end that paths to its first jobs and
               from its last ones force, and its memory (`memory_bound`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

import numpy as np

from schedgen.ir.cost import Amount, by_stage, durations, has_both, redo_duration, shortest_halves
from schedgen.ir.header import Header
from schedgen.ir.instructions import F
from schedgen.ir.job_graph import job_graph
from schedgen.simulator.memory_bound import WorkerJobs, memory_bound
from schedgen.util.arrays import Flags, Floats, Ints, Numbers, Times

MOST_NODES = 600  # directions x stages: with more, `ends` is 0, since it takes time for all pairs of nodes


def lower_bounds(
    header: Header, cost: Mapping[str, Amount], peak_activations: Numbers, redone: Flags | None = None
) -> dict[str, float]:
    """The bounds by name: work, critical_path, ends and, if there are backwards, memory; in units of `cost`.

    Where backwards are split and `cost` also has a B, some backwards may be whole. `peak_activations`: by worker;
    `redone`: (S, B), whether there is a RECOMPUTE; None: only where a backward runs on another worker than its forward.
    """
    lengths = {name: by_stage(t, header.stages) for name, t in durations(cost, len(header.directions)).items()}
    if len(lengths) == 3 and has_both(cost):
        lengths = shortest_halves(cost, header.stages)
    none = np.zeros(header.stages)
    forward, backward, weights = [*lengths.values(), none, none][:3]
    busy = np.zeros(header.workers)
    for d, name in enumerate(header.directions):
        time = np.repeat(lengths[name], header.microbatches)
        busy += np.bincount(header.compute[d].ravel(), time, minlength=header.workers)
    moved = (header.compute[0] != header.compute[1:]).any(axis=0)
    # Where the loss, or a slice of it, is redone elsewhere, that need not wait for its forward.
    loss = moved.any(axis=1) & [not consumers for consumers in header.graph.consumers]
    if loss.any():
        forward = np.where(loss, np.minimum(forward, redo_duration(cost)), forward)
    # The longest path between each stage, itself left out, and the loss: in forwards, and in backwards.
    forwards, backwards = np.zeros((2, header.stages))
    for producer, consumer in sorted(header.graph.edges, reverse=True):
        forwards[producer] = max(forwards[producer], forwards[consumer] + forward[consumer])
        backwards[producer] = max(backwards[producer], backwards[consumer] + backward[consumer])
    alive = forwards + backwards + backward + weights  # from the end of a stage's forward to that of its W
    bounds = {"work": float(busy.max()), "critical_path": float((forward + alive).max())}
    redone = moved if redone is None else redone | moved
    bounds["ends"] = _ends_of(header, lengths, peak_activations, redone)
    if not header.is_forward:
        time = np.where(redone, 0.0, alive[:, None]).ravel()
        held = np.bincount(header.compute[F].ravel(), time, minlength=header.workers)
        bounds["memory"] = float((held / np.maximum(peak_activations, 1)).max())
    return bounds


def _ends_of(header: Header, lengths: Mapping[str, Times], peak_activations: Numbers, redone: Flags) -> float:
    """`_ends` without messages, with the memory that the schedule takes; of stages that redo forwards, with none.

    0 with very many stages, or if a backward is on another worker than its forward: it redoes it, and need not wait.
    """
    directions, stages = len(lengths), header.stages
    if directions * stages > MOST_NODES or (header.compute != header.compute[0]).any():
        return 0.0
    takes = np.zeros((directions, stages))
    if directions > 1:
        takes[0], takes[-1] = ~redone.any(axis=1), -1.0 * ~redone.any(axis=1)
    times = np.concatenate(list(lengths.values()))
    before = job_graph(header.graph, header.microbatches, directions).pred
    way = longest_ways(before, times, {})
    capacity = np.maximum(peak_activations, 1).astype(np.float64)
    return _ends(header.compute, way, times, False, takes.ravel(), capacity)


def order_bound(
    before: Sequence[Sequence[int]], compute: Ints, lengths: Times, hops: Mapping[tuple[int, int], float],
    own_window: bool, takes: Floats, capacity: Floats,
) -> float:  # fmt: skip
    """A lower bound on the latency of any order of these jobs or, with `own_window`, on the longest own window.

    before      by node, the nodes that it waits for
    compute     the worker of every job, (D, S, B)
    lengths     duration by node
    hops        time of a message from one node to another, where all microbatches change workers
    own_window  a worker's time begins with its first job, so that only paths from one of its jobs to another count
    takes       by node: memory that a job takes when it begins; below 0: memory that it releases when it ends
    capacity    by worker: its memory
    """
    nodes, workers = len(before), len(capacity)
    way = longest_ways(before, lengths, hops)
    jobs = np.zeros((workers, nodes))  # by worker and node
    for node in range(nodes):
        jobs[:, node] = np.bincount(compute.reshape(nodes, -1)[node], minlength=workers)
    busy = jobs * lengths
    longest = float(busy.sum(axis=1).max())
    for u in range(workers if own_window else 1):
        mine = jobs[u] == compute.shape[2] if own_window else np.ones(nodes, bool)  # u has every microbatch
        if mine.any():
            heads = way[mine].max(axis=0)
            tails = (way[:, mine] + lengths[mine]).max(axis=1) - lengths
            longest = max(longest, *(_threaded(heads, tails, busy[w]) for w in range(workers)))
    return max(longest, _ends(compute, way, lengths, own_window, takes, capacity))


def _ends(compute: Ints, way: Times, lengths: Times, own_window: bool, takes: Floats, capacity: Floats) -> float:
    """The largest `memory_bound` of all workers; arguments as in `order_bound`; `way`: the longest paths."""
    longest, seen, placed = 0.0, set(), compute.reshape(len(way), -1)
    for w in range(len(capacity)):
        own = np.flatnonzero((placed == w).any(axis=1)).astype(np.int64)
        if not len(own):
            continue
        worker = _worker_jobs(placed[own] == w, own, compute.shape[1], way, lengths, takes, own_window)
        key = b"".join(each.tobytes() for each in (*worker, capacity[w]))
        if key not in seen:  # data-parallel workers are all alike
            longest = max(longest, memory_bound(worker, float(capacity[w])))
        seen.add(key)
        for u in range(len(capacity)) if own_window else ():
            mine = (placed == u).all(axis=1)  # nodes of which u has every microbatch
            if not mine.any() or not (way[mine].max(axis=0) > -np.inf).all():
                continue  # some job does not come after u's
            heads = way[np.ix_(mine, own)].max(axis=0)
            tails = (way[np.ix_(own, mine)] + lengths[mine]).max(axis=1) - lengths[own]
            if ((tails > -np.inf) | (takes[own] < 0)).all():
                longest = max(longest, memory_bound(worker._replace(head=heads, tail=tails), float(capacity[w])))
    return longest


def _worker_jobs(
    here: Flags, own: Numbers, stages: int, way: Times, lengths: Times, takes: Floats, own_window: bool
) -> WorkerJobs:
    """The jobs of a worker. `own`: the nodes of which it has jobs; `here`: for each, which microbatches it has."""
    among, length = way[np.ix_(own, own)], lengths[own]
    waits = (among > -np.inf) & (here[:, None] == here).all(axis=2)  # waits[k, j]: job j waits for job k of this worker
    if own_window:
        heads = np.where(waits, among, 0.0).max(axis=0)
        tails = np.where(waits, among + length, length[:, None]).max(axis=1) - length
    else:
        heads, tails = way[:, own].max(axis=0), (way[own] + lengths).max(axis=1) - length
    return WorkerJobs(own % stages, heads, tails, length, here.sum(axis=1), takes[own], waits.T)


def longest_ways(before: Sequence[Sequence[int]], lengths: Times, hops: Mapping[tuple[int, int], float]) -> Times:
    """By pair of nodes: the least time from the first one's start to the second's; -inf if there is no path."""
    way = np.full((len(before), len(before)), -np.inf)
    for node in TopologicalSorter(dict(enumerate(before))).static_order():
        way[node, node] = 0.0
        for other in before[node]:
            way[:, node] = np.maximum(way[:, node], way[:, other] + lengths[other] + hops.get((other, node), 0.0))
    return way


def _threaded(heads: Times, tails: Times, busy: Times) -> float:
    """The largest sum, over sets of nodes, of their least head, their work and their least tail."""
    there, longest = (busy > 0) & np.isfinite(heads) & np.isfinite(tails), 0.0
    for head in np.unique(heads[there]):
        late = there & (heads >= head)
        for tail in np.unique(tails[late]):
            longest = max(longest, float(head + tail + busy[late & (tails >= tail)].sum()))
    return longest
