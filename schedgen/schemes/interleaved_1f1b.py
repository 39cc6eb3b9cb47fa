"""Interleaved 1F1B: v stages a worker, the pipeline goes round v times; a bubble v times smaller than 1F1B's.
w(s, b, d) = (s mod W, s mod W)   [Narayanan et al. 2021, "Efficient large-scale training", section 2.2; S = vW]
n: forwards and backwards in rounds of microbatches, alternating behind a warm-up, strict
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import F
from schedgen.schemes.looped import chunked
from schedgen.schemes.scheme import Function, Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """S = v W; the microbatches make rounds of equally many."""
    W, v = chunked(name, sizes)
    n = _n(W, v, sizes.microbatches)
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), n, name, "strict", parameters={"chunks": v})


def _n(W: int, v: int, batches: int) -> Function:
    """The k-th forward of worker r has n = 2 (k - warm-up), the k-th backward 2k + 1.

    Each goes through its stages in rounds of `size` microbatches: W of them,
    or as many as divide B into equal rounds. Warm-up is (v - 1) rounds and
    2 (W - 1 - r) more.
    """
    rounds = max(1, batches // W)
    size = batches // rounds
    if batches % rounds:
        raise UsageError(
            f"interleaved-1f1b runs in {rounds} rounds of equally many microbatches: {batches} do not divide"
        )

    def n(s: Any, b: Any, d: Any) -> Any:
        r, chunk = s % W, s // W
        turn = np.where(d == F, chunk, v - 1 - chunk)
        k = (b // size * v + turn) * size + b % size
        warm_up = 2 * (W - 1 - r) + (v - 1) * size
        return np.where(d == F, 2 * (k - warm_up), 2 * k + 1)

    return n
