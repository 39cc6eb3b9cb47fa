"""Looped pipeline parallelism: G groups of R = W/G workers; each group is a pipeline for its microbatches.
w(s, b, d) = (h(s, b), h(s, b)), h(s, b) = (R b mod W) + (s mod R)   [Rahimi 2025, "Formal definitions"]
n: depth-first, greedy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import NeedsOption, UsageError

PARAMETERS = ("workers", "groups")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """The scheme for W = G R workers, which `sizes` must give, with R <= S and G <= B."""
    W, G, h = grouped(name, sizes)
    n = depth_first(sizes)
    return Scheme(name, W, lambda s, b, d: (h(s, b), h(s, b)), n, "depth-first", "greedy", parameters={"groups": G})


def grouped(name: str, sizes: Sizes) -> tuple[int, int, Callable[[Any, Any], Any]]:
    """W, G and h of a scheme with G groups of R = W/G workers; UsageError if sizes do not fit."""
    if sizes.workers is None or sizes.groups is None:
        raise NeedsOption(f"{name} needs --workers W and --groups G")
    W, G = sizes.workers, sizes.groups
    if W % G:
        raise UsageError(f"{name} needs groups of equal size: {W} workers do not divide into {G} groups")
    R = W // G
    if sizes.stages < R:
        raise UsageError(
            f"{name} gives every worker at least one stage: groups of {R} workers do not fit {sizes.stages} stages"
        )
    if sizes.microbatches < G:
        raise UsageError(
            f"{name} gives every group at least one microbatch: {G} groups do not fit {sizes.microbatches} microbatches"
        )
    return W, G, lambda s, b: (R * b % W) + (s % R)
