"""Breadth-first: v stages a worker, and whoever is free takes the oldest stage.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "One code to schedule them all"; S = vW]
n: oldest stage first, greedy
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.limits import check_workers
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes, name: str, order: str = "breadth-first") -> Scheme:
    """A looped pipeline for S = v W, in any of ORDERS."""
    W, v = chunked(name, sizes)
    n = ORDERS[order](sizes)
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), n, order, "greedy", parameters={"chunks": v})


# What all schemes with several stages a worker share:


def chunked(name: str, sizes: Sizes, chunks: int | None = None) -> tuple[int, int]:
    """(W, v) with S = v W; `chunks`: v, if the scheme itself fixes it. UsageError if sizes do not fit."""
    v = chunks or sizes.chunks
    if v is None:
        v = sizes.stages // sizes.spread(name, "stages") if sizes.workers else 2
    if sizes.stages % v:
        raise UsageError(f"{name} has {v} stages a worker: {sizes.stages} stages do not divide")
    workers = sizes.stages // v
    if sizes.workers not in (None, workers):
        raise UsageError(
            f"{name} with {sizes.stages} stages, {v} a worker, needs {workers} workers, not {sizes.workers}"
        )
    check_workers(workers, sizes.stages)
    return workers, v


def vee(s: Any, S: int) -> Any:
    """The worker of stage s of S, down the workers and up again."""
    return np.minimum(s, S - 1 - s)
