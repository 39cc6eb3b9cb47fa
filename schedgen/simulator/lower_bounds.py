"""Lower bounds on the latency of a schedule, whatever the order of its jobs.

work           the busiest worker's jobs, one after another
critical_path  the forwards and backwards of one microbatch, one after another
memory         Each forward's saved activations are alive until its backward has ended. The sum of these times over all
               jobs fits into the latency times the workers' peaks of activations. This is the theorem of Rahimi 2025
               (throughput <= M / S, for identical stages in a chain, one unit of memory each, messages hidden) with
               the jobs' own durations and for any DAG of stages.
window         of a chain: no worker begins before a forward has reached it, and none ends before its last backward
               has gone back to the first stage
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from schedgen.ir.cost import Amount, by_stage, durations
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Ints
from schedgen.simulator.timeline import Times


def lower_bounds(header: Header, cost: Mapping[str, Amount], peak_activations: int) -> dict[str, float]:
    """work, critical_path and, unless there are forwards alone, memory, in the units of `cost`.

    `peak_activations`: summed over workers.
    """
    lengths = {name: by_stage(t, header.stages) for name, t in durations(cost, len(header.directions)).items()}
    none = np.zeros(header.stages)
    forward, backward, weights = [*lengths.values(), none, none][:3]
    busy = np.zeros(header.workers)
    for d, name in enumerate(header.directions):
        time = np.repeat(lengths[name], header.microbatches)
        busy += np.bincount(header.compute[d].ravel(), time, minlength=header.workers)
    # The longest path from behind each stage to the loss, in forwards and in backwards.
    forwards, backwards = np.zeros((2, header.stages))
    for producer, consumer in sorted(header.graph.edges, reverse=True):
        forwards[producer] = max(forwards[producer], forwards[consumer] + forward[consumer])
        backwards[producer] = max(backwards[producer], backwards[consumer] + backward[consumer])
    alive = forwards + backwards + backward + weights  # from the end of a stage's forward to that of its W
    bounds = {"work": float(busy.max()), "critical_path": float((forward + alive).max())}
    if not header.is_forward:
        bounds["memory"] = float(alive.sum()) * header.microbatches / max(peak_activations, 1)
    return bounds


def window_bound(compute: Ints, lengths: Times, recompute: Times, hops: Times, workers: int) -> float:
    """The time to a worker's first job, its jobs, and the time back to the first stage: the most of any worker.

    compute    the worker of every job of a chain, (D, S, B)
    lengths    the duration of each direction by stage, (D, S)
    recompute  of the RECOMPUTE beside each backward, (S,), which need not wait for what the backward waits for
    hops       of a message from each stage to the next, (S - 1,); it counts where all microbatches change workers
    """
    hops = np.where((compute[F, 1:] != compute[F, :-1]).all(axis=1), hops, 0.0)
    reached = np.concatenate([[0.0], np.cumsum(lengths[F, :-1] + hops)])  # from the start until stage s may begin
    back = np.concatenate([[0.0], np.cumsum(lengths[B, :-1] + hops)])  # from its backward to the first stage's end
    lengths = lengths.copy()
    lengths[B] += recompute
    busy = np.zeros((len(compute), workers))
    head, tail = np.full((2, workers), np.inf)
    for s in range(len(recompute)):
        for d in range(len(compute)):
            busy[d] += lengths[d, s] * np.bincount(compute[d, s], minlength=workers)
        np.minimum.at(head, compute[F, s], reached[s])
        np.minimum.at(tail, compute[B, s], back[s])
    used = np.isfinite(head) & np.isfinite(tail)
    windows = head + busy[F] + busy[B] + tail
    return float(np.maximum(windows, head + busy.sum(axis=0))[used].max())
