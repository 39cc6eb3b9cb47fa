"""Looped pipeline parallelism: G groups of R = W/G workers; each group is a pipeline for its microbatches.
w(s, b, d) = (h(s, b), h(s, b)), h(s, b) = (R b mod W) + (s mod R)   [Rahimi 2025, "Formal definitions"]
n: depth-first, greedy
"""

from __future__ import annotations

from typing import Any

from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import NeedsOption, UsageError

PARAMETERS = ("workers", "groups")


def scheme(sizes: Sizes, name: str, fully_sharded: bool = False) -> Scheme:
    """The scheme for W = G R workers, which `sizes` must give, with R <= S and G <= B; UsageError if they do not fit.

    `fully_sharded`: every stage has one owner.
    """
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

    def h(s: Any, b: Any) -> Any:
        return (R * b % W) + (s % R)

    def w(s: Any, b: Any, d: Any) -> Any:
        return h(s, s if fully_sharded else b), h(s, b)

    return Scheme(name, W, w, depth_first(sizes), "depth-first", "greedy", parameters={"groups": G})
