"""How short a schedule could be at best, whatever its order: lower bounds on its latency.

work           the busiest worker's jobs, one after another
critical_path  one microbatch's way to the loss and back
memory         what forwards save must stay alive until their backward has
               ended; the workers' peaks of activations, held for the whole
               latency, must make room for all that time. This is the theorem
               of Rahimi 2025 (throughput <= M / S; premises: identical stages
               in a chain, one unit of memory each, messages hidden), with the
               jobs' own durations and for any DAG of stages.
window         of a chain: no worker begins before a forward has reached it,
               none ends before its last backward has gone to the first stage
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.cost import Amount, by_stage, durations
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Ints


def lower_bounds(header: Header, cost: Mapping[str, Amount], peak_activations: int) -> dict[str, float]:
    """Lower bounds on the latency, in the units of `cost`; `peak_activations`: summed over workers."""
    split = "W" in header.cost
    lengths = {name: by_stage(time, header.stages) for name, time in durations(cost, split).items()}
    forward, backward = lengths["F"], lengths["I"] if split else lengths["B"]
    weights = lengths["W"] if split else np.zeros(header.stages)
    busy = np.zeros(header.workers)
    for d, name in enumerate(header.directions):
        time = np.repeat(lengths[name], header.microbatches)
        busy += np.bincount(header.compute[d].ravel(), time, minlength=header.workers)
    # The longest ways from behind each stage to the loss and back: forwards there and backwards.
    there, back = np.zeros((2, header.stages))
    for producer, consumer in sorted(header.graph.edges, reverse=True):
        there[producer] = max(there[producer], there[consumer] + forward[consumer])
        back[producer] = max(back[producer], back[consumer] + backward[consumer])
    # From the end of a stage's forward on: forwards to the loss, backwards to this stage, and its W.
    alive = there + back + backward + weights
    return {
        "work": float(busy.max()),
        "critical_path": float((forward + alive).max()),
        "memory": float(alive.sum()) * header.microbatches / max(peak_activations, 1),
    }


def window_bound(
    compute: Ints, lengths: NDArray[np.float64], again: NDArray[np.float64], hops: NDArray[np.float64], workers: int
) -> float:
    """A lower bound on the latency of a chain of stages: the way to a worker's first job, its jobs, the way back.

    compute  the worker of every job, (D, S, B)
    lengths  the duration of each direction by stage, (D, S)
    again    of the RECOMPUTE besides each backward, (S,), which need not wait for what the backward waits for
    hops     of a message from each stage to the next, (S - 1,); it counts where all microbatches change workers
    """
    hops = np.where((compute[F, 1:] != compute[F, :-1]).all(axis=1), hops, 0.0)
    there = np.concatenate([[0.0], np.cumsum(lengths[F, :-1] + hops)])  # until stage s may begin
    back = np.concatenate([[0.0], np.cumsum(lengths[B, :-1] + hops)])  # from its backward to the first stage's end
    lengths = lengths.copy()
    lengths[B] += again
    busy = np.zeros((len(compute), workers))
    head, tail = np.full((2, workers), np.inf)
    for s in range(len(again)):
        for d in range(len(compute)):
            busy[d] += lengths[d, s] * np.bincount(compute[d, s], minlength=workers)
        np.minimum.at(head, compute[F, s], there[s])
        np.minimum.at(tail, compute[B, s], back[s])
    used = np.isfinite(head) & np.isfinite(tail)
    ways = head + busy[F] + busy[B] + tail
    return float(np.maximum(ways, head + busy.sum(axis=0))[used].max())
