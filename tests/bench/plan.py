"""The time of PipeDream's dynamic programme, and how it grows with layers and workers: seconds, the second of two runs.

A chain of random layers, so that few are left out early; on one level, and with a memory limit on two.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from schedgen.cost import Machine
from schedgen.plan.cuts import cuts
from schedgen.plan.partition import Level, partition
from schedgen.plan.profile import Layers


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


def seconds(layers: int, levels: list[Level], memory: float = np.inf) -> float:
    model = chain(layers)
    found = 0.0
    for _ in range(2):  # the first compiles the kernel
        begin = time.perf_counter()
        partition(cuts(model), levels, memory)
        found = time.perf_counter() - begin
    return found


def main() -> None:
    sizes = (50, 100, 200, 400, 800)
    print(f"{'layers':20}{''.join(f'{size:>10}' for size in sizes)}")
    for workers in (4, 16, 64, 256):
        found = (seconds(size, [Level(workers, 1e9)]) for size in sizes)
        print(f"{workers:3} workers{'':9}{''.join(f'{one:10.3f}' for one in found)}", flush=True)
    for a, b in ((4, 4), (8, 8)):
        for words, memory in (("", np.inf), (", limit", 3e9)):
            found = (seconds(size, [Level(a, 1e10), Level(b, 1e9)], memory * size) for size in sizes[:4])
            print(f"{f'{a} x {b} workers{words}':20}{''.join(f'{one:10.3f}' for one in found)}", flush=True)


if __name__ == "__main__":
    main()
