"""GPipe: a worker a stage, all forwards and then all backwards.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "Formal definitions"; W <= S, there W = S]
n: breadth-first, strict; with W = S that is n(s, b, F) = b, n(s, b, B) = B + b   [GPipe, section 2.3]
With S = vW it is looped breadth-first   [Lamy-Poirier 2022, "Breadth-first pipeline parallelism"]
"""

from __future__ import annotations

from schedgen.schemes.orders import breadth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """GPipe on W <= S workers; W = S if `sizes` gives none."""
    W = sizes.spread(name, "stages")
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), breadth_first(sizes), "breadth-first", "strict")
