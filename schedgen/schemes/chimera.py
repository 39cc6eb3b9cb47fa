"""Chimera: two pipelines in opposite directions over the same workers, each stage on two of them.
w(s, b, d) = (h(s, b), h(s, b)), h(s, b) = s for even b, S - 1 - s for odd b   [Li, Hoefler 2021, section 3.1; W = S]
n: 1F1B in both directions, merged; units of S microbatches one after another, strict
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.schemes.orders import position
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """Chimera on W = S workers; S must be even."""
    S = sizes.stages
    if S % 2 or sizes.workers not in (None, S):
        raise UsageError(f"{name} needs an even number of stages and as many workers, not {S} and {sizes.workers or S}")

    def h(s: Any, b: Any) -> Any:
        return np.where(b % 2 == 0, s, S - 1 - s)

    def n(s: Any, b: Any, d: Any) -> Any:
        # 1F1B's slots, n(F) = s + 2k and n(B) = 2S - 1 - s + 2k for the k-th of S/2 microbatches of a direction:
        # those of the other direction fall between them.
        return position(s, d, S) + 2 * (b % S // 2) + 2 * S * (b // S)

    return Scheme(name, S, lambda s, b, d: (h(s, b), h(s, b)), n, name, "strict")
