"""Sizes of the models that benchmarks train; importing this module loads no library."""

from __future__ import annotations

from typing import NamedTuple

BLOCKS = 4


class Case(NamedTuple):
    width: int
    heads: int
    length: int
    sequences: int  # of a microbatch
    microbatches: int  # of a step, over all ranks
    steps: int  # timed ones


# compute: jobs of many milliseconds; overhead: of under a millisecond, so that the overhead shows; dN: width N;
# gpu: jobs of some milliseconds on a GPU; quick: to see whether a benchmark runs.
CASES = {
    "compute": Case(width=256, heads=8, length=256, sequences=1, microbatches=8, steps=15),
    "overhead": Case(width=64, heads=4, length=16, sequences=1, microbatches=64, steps=30),
    "d48": Case(width=48, heads=4, length=24, sequences=1, microbatches=48, steps=30),
    "d128": Case(width=128, heads=4, length=64, sequences=2, microbatches=16, steps=30),
    "d384": Case(width=384, heads=6, length=128, sequences=2, microbatches=8, steps=15),
    "gpu": Case(width=1024, heads=16, length=1024, sequences=4, microbatches=8, steps=15),
    "quick": Case(width=16, heads=2, length=16, sequences=1, microbatches=4, steps=2),
}


class Layers(NamedTuple):
    """A model that `schedgen plan` may cut between layers."""

    case: Case
    blocks: tuple[int, ...]  # of each layer; the first also has the embedding, the last the head


_NARROW = Case(width=128, heads=4, length=128, sequences=1, microbatches=16, steps=10)
LAYERED = {  # the last is for quick runs
    "uneven": Layers(_NARROW, (1, 1, 1, 1, 1, 1, 4, 4)),
    "quick_layers": Layers(CASES["quick"], (1,) * BLOCKS),
}
