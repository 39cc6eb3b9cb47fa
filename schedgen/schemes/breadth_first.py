"""Breadth-first: v stages a worker, and whoever is free takes the oldest stage.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "One code to schedule them all"; S = vW]
n: oldest stage first, greedy
"""

from __future__ import annotations

from schedgen.schemes.looped import chunked
from schedgen.schemes.orders import breadth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes) -> Scheme:
    W, v = chunked("breadth-first", sizes)
    return Scheme(
        "breadth-first",
        W,
        lambda s, b, d: (s % W, s % W),
        breadth_first(sizes),
        "breadth-first",
        "greedy",
        parameters={"chunks": v},
    )
