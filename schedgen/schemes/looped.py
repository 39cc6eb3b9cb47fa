"""What schemes with several stages per worker share: the sizes they need, and two placements.

looped  stage s on worker s mod W: the pipeline goes round v times
vee     stage s on worker min(s, 2W - 1 - s): down the workers and up again
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.limits import check_workers
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import UsageError


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
