"""The cuts that plan's local search finds, compared with all cuts of 200 random lists of up to 12 layers.

Backwards take twice their forwards and messages nothing. Prints a line per scheme: the number of lists, the mean and
the largest time relative to the best of all cuts, the mean of balanced stages, the mean numbers of all and tried cuts.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import NamedTuple

import numpy as np

from schedgen.compiler.compile import compile
from schedgen.planner.cut_moves import Cuts, best_cuts
from schedgen.planner.plan import MOST_CUTS
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.simulate import simulate
from schedgen.util.jit import compiled_always

SCHEMES = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2}  # stages a worker


class Result(NamedTuple):
    """One list of layers: times relative to the best, and numbers of cuts."""

    search: float
    balanced: float
    all_cuts: int
    tried: int


def measure(scheme: str, choose: random.Random) -> Result:
    """A random list in a random number of stages, on so many microbatches that interleaving divides them."""
    chunks = SCHEMES[scheme]
    workers = choose.randint(2, 4)
    layers = [choose.randint(1, 20) for _ in range(choose.randint(chunks * workers, 12))]
    sizes = Sizes(chunks * workers, workers * choose.randint(1, 4), workers)
    program = compile(load(scheme, sizes), sizes)
    until = np.concatenate([[0.0], np.cumsum(layers)])
    times: dict[Cuts, float] = {}

    def seconds(cuts: Cuts) -> float:
        forward = np.diff(until[[0, *cuts]])
        times[cuts] = float(simulate(program, {"F": forward, "B": 2 * forward}).end.max())
        return times[cuts]

    every = [(*cuts, len(layers)) for cuts in itertools.combinations(range(1, len(layers)), sizes.stages - 1)]
    balanced = min(every, key=lambda cuts: np.diff(until[[0, *cuts]]).max())
    best = best_cuts(balanced, seconds, MOST_CUTS)
    tried = len(times)
    fastest = min(map(seconds, every))
    return Result(times[best] / fastest, times[balanced] / fastest, len(every), tried)


def main() -> None:
    """Print a line a scheme."""
    choose = random.Random(0)
    count = 1 if "--quick" in sys.argv else 50
    print(f"{'':18}{'lists':>6}{'search':>9}{'worst':>9}{'balanced':>10}{'cuts':>7}{'tried':>7}")
    for scheme in SCHEMES:
        with compiled_always():
            results = np.array([measure(scheme, choose) for _ in range(count)])
        search, balanced, every, tried = results.mean(axis=0)
        worst = results[:, 0].max()
        print(f"{scheme:18}{count:6}{search:9.4f}{worst:9.4f}{balanced:10.4f}{every:7.0f}{tried:7.0f}", flush=True)


if __name__ == "__main__":
    main()
