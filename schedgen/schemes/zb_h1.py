"""ZB-H1: 1F1B with a split backward; W jobs fill the bubble, with 1F1B's memory.
w(s, b, d) = (s mod W, s mod W)   [Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.3; W = S]
n(F) = b, n(I) = b + W-1-s, n(W) = b + W-1, ties F < I < W, strict
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import B, F
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str, h: int = 1) -> Scheme:
    """The paper's handcrafted schedules, for W = S: h = 1 keeps 1F1B's memory, h = 2 fills the bubbles at twice that.

    n(I) = b + h (W-1-s) and n(W) = b + h (W-1), if there are enough microbatches. H2 warms up with more forwards than
    H1; if there are fewer microbatches, its backwards wait only for the forwards that exist.
    """
    p = sizes.stages
    if sizes.workers not in (None, p):
        raise UsageError(f"{name} has one stage a worker: {p} stages need {p} workers, not {sizes.workers}")

    more = min((h - 1) * (p - 1), max(0, sizes.microbatches - p))

    def n(s: Any, b: Any, d: Any) -> Any:
        ahead = np.minimum(h * (p - 1 - s), p - 1 - s + more)
        place = b + np.where(d == F, 0, np.where(d == B, ahead, p - 1 + more))
        return 3 * place + d

    return Scheme(name, p, lambda s, b, d: (s, s), n, name, "strict", split=True)
