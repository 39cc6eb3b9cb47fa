"""Fully sharded looped pipeline: lpp's placement of jobs, every stage has one owner.
w(s, b, d) = (h(s, s), h(s, b)), h(s, b) = (R b mod W) + (s mod R)   [Rahimi 2025, "Formal definitions"]
n: depth-first, greedy
"""

from __future__ import annotations

from schedgen.schemes.lpp import grouped
from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "groups")


def scheme(sizes: Sizes) -> Scheme:
    W, G, h = grouped("fslpp", sizes)
    return Scheme(
        "fslpp",
        W,
        lambda s, b, d: (h(s, s), h(s, b)),
        depth_first(sizes),
        "depth-first",
        "greedy",
        parameters={"groups": G},
    )
