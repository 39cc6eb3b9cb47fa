"""Hanayo: the pipeline goes down and up the workers in waves; w waves make the bubble w times smaller, without copies.
w(s, b, d) = (h(s), h(s)), h(s) = min(k, 2W - 1 - k), k = s mod 2W   [Liu et al. 2023, "Hanayo"; S = 2wW, --chunks 2w]
n(s, b, F) = s + 4b, n(s, b, B) = S + 2(S-1-s) + 4b, greedy; at equal n the job whose microbatch has passed fewer stages
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import F
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.orders import position
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """Hanayo for S = 2 w W: every wave has two stages on each worker."""
    W, v = chunked(name, sizes)
    if v % 2:
        raise UsageError(f"{name} goes down and up the workers: {v} stages a worker are no whole number of waves")
    S = sizes.stages

    def n(s: Any, b: Any, d: Any) -> Any:
        return (np.where(d == F, s, S + 2 * (S - 1 - s)) + 4 * b) * 2 * S + position(s, d, S)

    return Scheme(name, W, lambda s, b, d: (vee(s % (2 * W), 2 * W),) * 2, n, name, "greedy", parameters={"chunks": v})
