"""The time of plan, and how it grows with layers and workers: seconds, the second of two runs.

PipeDream's dynamic programme for a chain of random layers, so that few are left out early. Then the search for a
schedule of a GPT of so many equal layers, 4 microbatches a worker.
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np

from schedgen.planner.layer_profile import Layers
from schedgen.planner.partition import partition, prefixes
from schedgen.planner.plan import plan
from schedgen.simulator.machine import Machine


def chain(layers: int) -> Layers:
    """Weights grow and activations shrink along it, as in a convolutional net."""
    rng = np.random.default_rng(layers)
    along = np.arange(layers) / layers
    machine = Machine(
        activation=rng.uniform(0.5, 1, layers) * 1e8 * (1.05 - along), weight=rng.uniform(0.5, 1, layers) * 1e8 * along
    )
    seconds = rng.uniform(0.5, 1.5, layers) / layers
    edges = tuple(itertools.pairwise(range(layers)))
    return Layers(tuple(map(str, range(layers))), edges, {"F": seconds / 3, "B": seconds * 2 / 3}, machine)


def gpt(layers: int) -> Layers:
    """Layers of 50 million parameters, of which the first is an embedding and the last a head."""
    seconds, weight = np.full(layers, 0.02), np.full(layers, 2e8)
    seconds[0], seconds[-1], weight[0], weight[-1] = 0.001, 0.03, 4e8, 4e8
    machine = Machine(alpha=2e-5, activation=3e7, weight=weight, saved=5e8, owned=3 * weight, step=1e-3)
    edges = tuple(itertools.pairwise(range(layers)))
    return Layers(tuple(map(str, range(layers))), edges, {"F": seconds, "B": 2 * seconds}, machine)


def seconds(layers: int, workers: int) -> float:
    model = chain(layers)
    found = 0.0
    for _ in range(2):  # the first compiles the kernel
        begin = time.perf_counter()
        partition(prefixes(model), workers, 1e9)
        found = time.perf_counter() - begin
    return found


def main() -> None:
    quick = "--quick" in sys.argv
    sizes = (10,) if quick else (50, 100, 200, 400, 800)
    print(f"{'layers':20}{''.join(f'{size:>10}' for size in sizes)}")
    for workers in (4,) if quick else (4, 16, 64, 256):
        found = (seconds(size, workers) for size in sizes)
        print(f"{workers:3} workers{'':9}{''.join(f'{one:10.3f}' for one in found)}", flush=True)
    print(f"\n{'search':20}{'layers':>10}{'schedules':>10}{'simulated':>10}{'seconds':>10}")
    for workers in (2,) if quick else (4, 16, 64):
        for layers in (4,) if quick else (32, 96):
            model = gpt(layers)
            for _ in range(2):
                begin = time.perf_counter()
                found = plan(model, workers, 1e10, 4 * workers)
                took = time.perf_counter() - begin
            counts = f"{layers:10}{found.schedules:10}{found.simulated:10}"
            print(f"{f'{workers} workers':20}{counts}{took:10.1f}", flush=True)


if __name__ == "__main__":
    main()
