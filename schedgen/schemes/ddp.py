"""Distributed data parallelism: every worker holds the whole model and its share of the microbatches.
w(s, b, d) = (b mod W, b mod W)   [Rahimi 2025, "Formal definitions"; W <= B, there W = B]
n: depth-first, greedy
"""

from __future__ import annotations

from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str, fully_sharded: bool = False) -> Scheme:
    """DDP on W <= B workers; W = B if `sizes` gives none. `fully_sharded`: every stage has one owner."""
    W = sizes.spread(name, "microbatches")
    return Scheme(
        name, W, lambda s, b, d: ((s if fully_sharded else b) % W, b % W), depth_first(sizes), "depth-first", "greedy"
    )
