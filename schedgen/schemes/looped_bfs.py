"""Looped breadth-first: v stages a worker; all microbatches go through a worker's stage before its next.
w(s, b, d) = (s mod W, s mod W)   [Lamy-Poirier 2022, "Breadth-first pipeline parallelism"; S = vW]
n: oldest stage first, strict
"""

from __future__ import annotations

from schedgen.schemes.looped import chunked
from schedgen.schemes.orders import breadth_first
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes) -> Scheme:
    W, v = chunked("looped-bfs", sizes)
    return Scheme(
        "looped-bfs",
        W,
        lambda s, b, d: (s % W, s % W),
        breadth_first(sizes),
        "breadth-first",
        "strict",
        parameters={"chunks": v},
    )
