"""The orders n that more than one scheme uses, each made for given sizes.

All are built on a job's position on the way of a microbatch through the
pipeline, pos(s, F) = s and pos(s, B) = 2S - 1 - s. n is doubled, plus one for W,
so that W comes directly after its I where the backward is split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedgen.ir.instructions import F, W
from schedgen.schemes.scheme import Function, Sizes


def position(s: Any, d: Any, S: int) -> Any:
    """pos(s, d); I and W have the position of B."""
    return np.where(d == F, s, 2 * S - 1 - s)


def breadth_first(sizes: Sizes) -> Function:
    """Oldest stage first: all microbatches of a stage before the next stage."""
    S, batches = sizes.stages, sizes.microbatches
    return lambda s, b, d: 2 * (position(s, d, S) * batches + b) + (d == W)


def depth_first(sizes: Sizes) -> Function:
    """Oldest microbatch first: a microbatch goes as far as it can."""
    S = sizes.stages
    return lambda s, b, d: 2 * (b * 2 * S + position(s, d, S)) + (d == W)


def one_f_one_b(sizes: Sizes) -> Function:
    """One forward, one backward [PipeDream, section 3.2]: n(F) = s + 2b, n(B) = 2S - 1 - s + 2b.

    These are multiplied by B, and b is added: where a worker holds several stages,
    the older microbatch goes first among jobs of equal n.
    """
    S, batches = sizes.stages, sizes.microbatches
    return lambda s, b, d: 2 * ((position(s, d, S) + 2 * b) * batches + b) + (d == W)


ORDERS: dict[str, Callable[[Sizes], Function]] = {
    "breadth-first": breadth_first,
    "depth-first": depth_first,
    "1f1b": one_f_one_b,
}
