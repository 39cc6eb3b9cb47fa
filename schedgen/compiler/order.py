"""When every job starts: each worker runs one job at a time, in the order that n says.

greedy   of the jobs that can start earliest, a free worker takes the one with the smallest n (`greedy_order.py`)
strict   each worker runs its jobs in increasing n (`strict_order.py`)

Messages take no time here (Rahimi 2025, section "Latency, network, and memory usage"). Arrays by job are flat over
(direction, stage, microbatch), as are the resulting start times.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.greedy_order import greedy
from schedgen.compiler.place import PlacedScheme
from schedgen.compiler.strict_order import strict
from schedgen.ir.cost import redo_duration
from schedgen.ir.instructions import DIRECTIONS, B, W
from schedgen.util.arrays import Times


def order(placed: PlacedScheme) -> Times:
    """The start time of every job of a refined scheme, in the unit of `PlacedScheme.exact_cost`.

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
    length, cost = np.empty(placed.compute.shape), placed.exact_cost
    times = [cost[direction] for direction in DIRECTIONS[len(length)]]
    length[:] = np.array(times, np.float64)[:, None, None]
    if placed.unsplit_backward.any():
        length[:, placed.unsplit_backward] = [[cost["F"]], [cost["I"] + cost["W"]], [0.0]]
    if placed.redone.any():
        length[B, placed.redone] += redo_duration(cost)
    return length.ravel()
