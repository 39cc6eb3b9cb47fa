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

from schedgen.cost import Amount, by_stage, durations
from schedgen.program import Header


def bounds(header: Header, cost: Mapping[str, Amount], peak_activations: int) -> dict[str, float]:
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
    for producer, consumer in sorted(header.edges, reverse=True):
        there[producer] = max(there[producer], there[consumer] + forward[consumer])
        back[producer] = max(back[producer], back[consumer] + backward[consumer])
    # From the end of a stage's forward on: forwards to the loss, backwards to this stage, and its W.
    alive = there + back + backward + weights
    return {
        "work": float(busy.max()),
        "critical_path": float((forward + alive).max()),
        "memory": float(alive.sum()) * header.microbatches / max(peak_activations, 1),
    }
