"""Depth-first: v stages a worker, and whoever is free takes the oldest microbatch.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "One code to schedule them all"; S = vW]
n: oldest microbatch first, greedy
"""

from __future__ import annotations

from schedgen.schemes.looped import chunked
from schedgen.schemes.orders import depth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes) -> Scheme:
    W, v = chunked("depth-first", sizes)
    return Scheme(
        "depth-first",
        W,
        lambda s, b, d: (s % W, s % W),
        depth_first(sizes),
        "depth-first",
        "greedy",
        parameters={"chunks": v},
    )
