"""When every job starts: each worker runs one job at a time, in the order that n says.

greedy   of the jobs that can start earliest, a free worker takes the one with the smallest n (`greedy_order.py`)
strict   each worker runs its jobs in increasing n

Messages take no time here (Rahimi 2025, section "Latency, network, and memory usage"). Arrays by job are flat over
(direction, stage, microbatch), as are the resulting start times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.greedy_order import greedy
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.cost import redo_duration
from schedgen.ir.instructions import DIRECTIONS, B, W
from schedgen.ir.job_graph import JobGraph, cycle, may_start, wait_arrays
from schedgen.util.arrays import Flags, Ints, Numbers, Times, stable_order
from schedgen.util.errors import UsageError
from schedgen.util.jit import kernel


def order(placed: PlacedScheme) -> Times:
    """The start time of every job of a refined scheme, in the unit of `PlacedScheme.lengths`.

    UsageError if n, caps or the memory limit block the schedule.
    """
    graph, (_, stages, batches) = placed.job_graph, placed.compute.shape
    worker, n, joined, length = placed.compute.ravel(), placed.n, np.zeros(placed.n.shape, bool), _lengths(placed)
    is_greedy = placed.scheme.mode == "greedy"
    if placed.unsplit_backward.any():  # whatever n says of their W, it is part of the I
        joined[W] = placed.unsplit_backward
        n = np.unique(n, return_inverse=True)[1].reshape(n.shape) if is_greedy else n.copy()
        n[joined] = -1 if is_greedy else n[B, placed.unsplit_backward]
    n = n.ravel()
    if is_greedy:
        one_by_one = placed.redone.ravel() if len(placed.compute) == 2 else None  # halves may interleave: I, I, W, W
        return greedy(graph, worker, n, length, placed.caps, placed.options.memory_limit, one_by_one)
    delayed = np.zeros(len(length), bool)
    delayed[: stages * batches] = placed.delayed_send.ravel()
    return strict(graph, worker, n, length, delayed, joined.ravel())


def _lengths(placed: PlacedScheme) -> Times:
    """The duration of each job: an unsplit I includes its W, and a backward includes the forward that it redoes."""
    length, cost = np.empty(placed.compute.shape), placed.lengths
    length[:] = np.stack([cost[direction] for direction in DIRECTIONS[len(length)]])
    if placed.unsplit_backward.any():
        length[B] += length[W] * placed.unsplit_backward
        length[W, placed.unsplit_backward] = 0.0
    if placed.redone.any():
        length[B] += redo_duration(cost) * placed.redone
    return length.ravel()


def strict(
    graph: JobGraph,
    worker: Ints,
    n: NDArray[Any],
    length: Times,
    delayed_send: Flags | None = None,
    joined: Flags | None = None,
) -> Times:
    """Start times of jobs.

    `delayed_send`: by job, whether its output leaves only after the worker's next job.
    `joined`: by job, whether it is a W that is part of its I, whose n it has.
    """
    order = np.argsort(n, kind="stable")
    order = order[stable_order(worker[order])]  # by worker, then by n
    same_worker = worker[order[:-1]] == worker[order[1:]]
    former, latter = order[:-1][same_worker], order[1:][same_worker]
    same_n = n[former] == n[latter]
    if joined is not None:
        same_n &= ~joined[latter]
    for i in np.flatnonzero(same_n)[:1]:
        a, b = int(former[i]), int(latter[i])
        raise UsageError(
            f"strict n must differ within a worker, but {graph.job_name(a)} and {graph.job_name(b)} "
            f"on worker {worker[a]} both have n = {n[a]}"
        )
    following, previous = np.full((2, len(worker)), -1)  # on the same worker; -1: none
    following[former], previous[latter] = latter, former
    waits, first_after, after = wait_arrays(graph)
    waits[latter] += 1
    delayed = np.zeros(len(worker), bool) if delayed_send is None else delayed_send & (following >= 0)
    ready = np.flatnonzero(waits == 0)
    stack = np.concatenate([ready, np.empty(len(worker) - len(ready), np.int64)])
    run = _strict.sized(4 * len(worker))
    start: Times = run(
        worker, following, previous, delayed, waits, first_after, after, length, graph.microbatches, stack, len(ready)
    )
    if (start < 0).any():
        sent = np.where(delayed, following, np.arange(len(worker)))
        raise UsageError(f"n stops the schedule: {cycle(graph, worker, start, previous, sent)}")
    return start


@kernel
def _strict(
    worker: Ints, following: Numbers, previous: Numbers, delayed: Flags, waits: Numbers, first: Numbers, after: Numbers,
    length: Times, batches: int, stack: Numbers, top: int,
) -> Times:  # fmt: skip
    """Start times by longest path; -1: never. Overwrites `waits` and `stack`; stack[:top] are jobs that can start."""
    start = np.zeros(len(following))
    while top:
        top -= 1
        job = stack[top]
        end = start[job] + length[job]
        # Other workers get the output of the job now unless it is delayed, and that of the previous job if it is.
        for sender in (job, previous[job]):
            if sender < 0 or (sender != job and not delayed[sender]):
                continue
            node = sender // batches
            for k in range(first[node], first[node + 1]):
                other = after[k] * batches + sender % batches
                if (delayed[sender] and worker[other] != worker[sender]) != (sender != job):
                    continue
                if may_start(other, end, start, waits):
                    stack[top] = other
                    top += 1
        other = following[job]
        if other >= 0 and may_start(other, end, start, waits):
            stack[top] = other
            top += 1
    for job in range(len(waits)):
        if waits[job]:
            start[job] = -1.0
    return start
