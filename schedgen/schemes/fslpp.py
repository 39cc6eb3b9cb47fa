"""Fully sharded looped pipeline: lpp's placement of jobs, every stage has one owner.
w(s, b, d) = (h(s, s), h(s, b)), h(s, b) = (R b mod W) + (s mod R)   [Rahimi 2025, "Formal definitions"]
n: depth-first, greedy
"""

from __future__ import annotations

from schedgen.schemes.lpp import grouped
from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "groups")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """The scheme for W = G R workers, which `sizes` must give, with R <= S and G <= B."""
    W, G, h = grouped(name, sizes)
    n = depth_first(sizes)
    return Scheme(name, W, lambda s, b, d: (h(s, s), h(s, b)), n, "depth-first", "greedy", parameters={"groups": G})
