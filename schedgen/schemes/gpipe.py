"""GPipe: a worker a stage, all forwards and then all backwards.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "Formal definitions"; W <= S, there W = S]
n: breadth-first, strict; with W = S that is n(s, b, F) = b, n(s, b, B) = B + b   [GPipe, section 2.3]
"""

from __future__ import annotations

from schedgen.schemes.orders import breadth_first
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """W <= S; W = S where it is left open."""
    W = stage_workers(name, sizes)
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), breadth_first(sizes), "breadth-first", "strict")


def stage_workers(name: str, sizes: Sizes) -> int:
    """W of a scheme that spreads stages: as many as stages unless given."""
    workers = sizes.stages if sizes.workers is None else sizes.workers
    if workers > sizes.stages:
        raise UsageError(
            f"{name} gives every worker at least one stage: {workers} workers do not fit {sizes.stages} stages"
        )
    return workers
