"""V-Min: ZB-V's placement with a third of 1F1B's activation memory, the least of its kind.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [Qi et al. 2024, "Controllable memory", section 3; S = 2W]
n: a building block repeated every 6 jobs, W jobs in the gaps, strict
"""

from __future__ import annotations

from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.schemes.v_half import blocks

PARAMETERS = ("workers",)


def scheme(sizes: Sizes) -> Scheme:
    def block(r: int, p: int) -> tuple[int, int, int, int]:
        gap = 2 if p % 3 == 0 else 0
        return r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1

    return blocks("v-min", sizes, block)
