"""Interleaved ZB-H1: v stages a worker, the pipeline goes round v times, W jobs fill the bubble. v = 1 is ZB-H1.
w(s, b, d) = (s mod W, s mod W)   [Qi et al. 2023, "Zero bubble", section 2.3, as torch's ScheduleInterleavedZeroBubble]
n: forwards, I and W in rounds of microbatches, in turn after a warm-up; on worker r a W is r turns after its I, strict
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import B, F
from schedgen.schemes.interleaved_1f1b import group_size, turn
from schedgen.schemes.looped import chunked
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers", "chunks")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """Interleaved ZB-H1 for S = v W; microbatches form rounds of equal size."""
    W, v = chunked(name, sizes)
    batches, group = sizes.microbatches, group_size(name, W, sizes)

    def n(s: Any, b: Any, d: Any) -> Any:
        r, k = s % W, turn(s, b, d, W, v, batches, group)
        warm_up = W - 1 - r + (v - 1) * group
        return 3 * (k + np.where(d == F, -warm_up, np.where(d == B, 0, r))) + d

    return Scheme(name, W, lambda s, b, d: (s % W, s % W), n, name, "strict", split=True, parameters={"chunks": v})
