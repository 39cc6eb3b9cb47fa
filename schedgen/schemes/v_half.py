"""V-Half: ZB-V's placement with half of 1F1B's activation memory.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [Qi et al. 2024, "Controllable memory", section 3; S = 2W]
n: a building block repeated every 6 jobs and squeezed, W jobs in the gaps, strict
"""

from __future__ import annotations

from schedgen.schemes.building_block import Block, half, squeezed_starts
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str, block: Block = half) -> Scheme:
    """V-Half, or V-Min with its `block`, for S = 2 W: a block every six slots has F and I of two stages, and two W."""
    p, _ = chunked(name, sizes, chunks=2)
    S = sizes.stages
    start = squeezed_starts(p, sizes.microbatches, block, keep_steady=block is half)
    return Scheme(
        name, p, lambda s, b, d: (vee(s, S), vee(s, S)), lambda s, b, d: start[d, s, b], name, "strict", split=True
    )
