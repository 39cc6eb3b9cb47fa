"""Distributed data parallelism: every worker holds the whole model and its share of the microbatches.
w(s, b, d) = (b mod W, b mod W)   [Rahimi 2025, "Formal definitions"; W <= B, there W = B]
n: depth-first, greedy
"""

from __future__ import annotations

from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """W <= B; W = B where it is left open."""
    W = data_workers(name, sizes)
    return Scheme(name, W, lambda s, b, d: (b % W, b % W), depth_first(sizes), "depth-first", "greedy")


def data_workers(name: str, sizes: Sizes) -> int:
    """W of a scheme that spreads microbatches: B where it is left open, UsageError where it is more."""
    workers = sizes.microbatches if sizes.workers is None else sizes.workers
    if workers > sizes.microbatches:
        raise UsageError(
            f"{name} gives every worker at least one microbatch: "
            f"{workers} workers do not fit {sizes.microbatches} microbatches"
        )
    return workers
