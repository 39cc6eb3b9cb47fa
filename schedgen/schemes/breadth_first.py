"""Breadth-first: v stages a worker, and whoever is free takes the oldest stage.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "One code to schedule them all"; S = vW]
n: oldest stage first, greedy
"""

from __future__ import annotations

from schedgen.schemes.looped import chunked
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes, name: str, order: str = "breadth-first") -> Scheme:
    """A looped pipeline for S = v W, in any of ORDERS."""
    W, v = chunked(name, sizes)
    n = ORDERS[order](sizes)
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), n, order, "greedy", parameters={"chunks": v})
