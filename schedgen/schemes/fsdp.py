"""Fully sharded data parallelism: microbatches are spread as in ddp, every stage has one owner.
w(s, b, d) = (s mod W, b mod W)   [Rahimi 2025, "Formal definitions"; W <= B, there W = B]
n: depth-first, greedy
"""

from __future__ import annotations

from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """FSDP on W <= B workers; W = B if `sizes` gives none."""
    W = sizes.spread(name, "microbatches")
    return Scheme(name, W, lambda s, b, d: (s % W, b % W), depth_first(sizes), "depth-first", "greedy")
