"""ZB-H2: as ZB-H1, but more forwards warm up, at twice 1F1B's memory.
Where F = I = W, no bubble between a worker's first and last job.
w(s, b, d) = (s mod W, s mod W)   [Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.3; W = S]
n(F) = b, n(I) = b + h (W-1-s), n(W) = b + h (W-1), h = 2, ties F < I < W, strict
"""

from __future__ import annotations

from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.schemes.zb_h1 import handcrafted

PARAMETERS = ("workers",)


def scheme(sizes: Sizes) -> Scheme:
    return handcrafted("zb-h2", sizes, h=2)
