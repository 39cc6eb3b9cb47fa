"""Looped breadth-first: v stages a worker; all microbatches go through a worker's stage before its next.
w(s, b, d) = (s mod W, s mod W)   [Lamy-Poirier 2022, "Breadth-first pipeline parallelism"; S = vW]
n: oldest stage first, strict
"""

from __future__ import annotations

from schedgen.schemes.looped import chunked
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes, name: str, order: str = "breadth-first", mode: str = "strict") -> Scheme:
    """A looped pipeline for S = v W, in any of ORDERS."""
    W, v = chunked(name, sizes)
    n = ORDERS[order](sizes)
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), n, order, mode, parameters={"chunks": v})
