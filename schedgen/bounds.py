"""How short a schedule could be at best, whatever its order: three lower bounds on its latency.

work           the busiest worker's jobs, one after another
critical_path  one microbatch's way to the loss and back
memory         what forwards save must stay alive until their backward has
               ended; the workers' peaks of activations, held for the whole
               latency, must make room for all that time. This is the theorem
               of Rahimi 2025 (throughput <= M / S; premises: identical stages
               in a chain, one unit of memory each, messages hidden), with the
               jobs' own durations and for any DAG of stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from schedgen.cost import durations
from schedgen.program import Header


def bounds(header: Header, cost: Mapping[str, float], peak_activations: int) -> dict[str, float]:
    """Lower bounds on the latency, in the units of `cost`; `peak_activations`: summed over workers."""
    split = "W" in header.cost
    lengths = durations(cost, split)
    forward, backward = lengths["F"], lengths["I"] if split else lengths["B"]
    busy = np.zeros(header.workers)
    for d, name in enumerate(header.directions):
        busy += np.bincount(header.compute[d].ravel(), minlength=header.workers) * lengths[name]
    # The longest way from each stage to the loss, in edges.
    depth = np.zeros(header.stages)
    for producer, consumer in sorted(header.edges, reverse=True):
        depth[producer] = max(depth[producer], depth[consumer] + 1)
    # From the end of a stage's forward on: forwards to the loss, backwards to this stage, and its W.
    alive = depth * forward + (depth + 1) * backward + (lengths["W"] if split else 0)
    return {
        "work": float(busy.max()),
        "critical_path": float(depth.max() + 1) * (forward + backward) + (lengths["W"] if split else 0),
        "memory": float(alive.sum()) * header.microbatches / max(peak_activations, 1),
    }
