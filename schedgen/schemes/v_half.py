"""V-Half: ZB-V's placement with half of 1F1B's activation memory.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [Qi et al. 2024, "Controllable memory", section 3; S = 2W]
n: a building block repeated every 6 jobs, W jobs in the gaps, strict
"""

from __future__ import annotations

from collections.abc import Callable

from schedgen.ir.instructions import B, F, W
from schedgen.schemes.job_lists import Job, place_in_list
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)

# When worker r of p runs F and then I of a microbatch, on its first stage going down and its second going up: the time
# slots of (F first, F second, I second, I first).
Block = Callable[[int, int], tuple[int, int, int, int]]


def half(r: int, p: int) -> tuple[int, int, int, int]:
    """The block of V-Half, with half of 1F1B's activation memory."""
    gap = 3 if p % 2 == 0 else 0
    return 2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2


def third(r: int, p: int) -> tuple[int, int, int, int]:
    """The block of V-Min, with a third of 1F1B's activation memory."""
    gap = 2 if p % 3 == 0 else 0
    return r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1


def scheme(sizes: Sizes, name: str, block: Block = half) -> Scheme:
    """S = 2 W. One building block a microbatch, six time slots apart: F and I of two stages, and two W."""
    p, _ = chunked(name, sizes, chunks=2)
    S = sizes.stages
    n = place_in_list(sizes, (_list(r, p, sizes.microbatches, block(r, p)) for r in range(p)))
    return Scheme(name, p, lambda s, b, d: (vee(s, S), vee(s, S)), n, name, "strict", split=True)


def _list(r: int, p: int, batches: int, block: tuple[int, int, int, int]) -> list[Job]:
    first, second = r, 2 * p - 1 - r
    kinds = ((F, first), (F, second), (B, second), (B, first))
    at = {slot + 6 * b: (d, s, b) for slot, (d, s) in zip(block, kinds, strict=True) for b in range(batches)}
    jobs: list[Job] = []
    waiting: list[Job] = []
    for slot in range(max(at) + 1):
        if slot in at:
            d, s, b = at[slot]
            jobs.append((d, s, b))
            if d == B:
                waiting.append((W, s, b))
        elif waiting:
            jobs.append(waiting.pop(0))
    return jobs + waiting
