"""The orders n that more than one scheme uses, each made for given sizes.

All are built on a job's position on the way of a microbatch through the
pipeline, pos(s, F) = s and pos(s, B) = 2S - 1 - s. n is doubled, plus one for W,
so that W comes directly after its I where the backward is split.

Orders that papers give as one list per worker become n, too: the place in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from schedgen.ir.instructions import B, F, W
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

Job = tuple[int, int, int]  # direction, stage, microbatch


def place_in_list(sizes: Sizes, lists: Iterable[Sequence[Job]]) -> Function:
    """n(s, b, d) = place of the job in its worker's list; jobs beyond the last microbatch are skipped."""
    n = np.zeros((sizes.stages, sizes.microbatches, 3), np.int64)
    for jobs in lists:
        d, s, b = np.array(jobs, np.int64).T
        real = b < sizes.microbatches
        n[s[real], b[real], d[real]] = np.flatnonzero(real)
    return lambda s, b, d: n[s, b, d]


class JobList:
    """The list of a worker with two stages, built job by job: each takes the next microbatch of its stage.

    Methods are called as the papers write: f(0) is F0, a forward of the first stage; b(1) is B1, an unsplit backward of
    the second. An I job adds its W job to a queue; w() runs the oldest W in it.
    """

    def __init__(self, first: int, second: int) -> None:
        self.stages = (first, second)
        self.jobs: list[Job] = []
        self.done = {(d, chunk): 0 for d in (F, B) for chunk in (0, 1)}
        self.waiting: list[tuple[int, int]] = []  # (stage, microbatch) of W jobs
        self.delayed: list[tuple[int, int]] = []  # (stage, microbatch) of forwards that send after the next job
        self.unsplit: list[tuple[int, int]] = []  # (stage, microbatch) of backwards that are not split

    def f(self, chunk: int) -> None:
        """Append a forward."""
        self._next(F, chunk)

    def i(self, chunk: int) -> None:
        """Append an I job, the gradient of the input, and queue its W job."""
        self.waiting.append((self.stages[chunk], self._next(B, chunk)))

    def b(self, chunk: int) -> None:
        """Append an unsplit backward: I and, immediately after it, W."""
        self.unsplit.append((self.stages[chunk], self._next(B, chunk)))
        self.jobs.append((W, *self.unsplit[-1]))

    def w(self, chunk: int | None = None) -> None:
        """Append the oldest queued W (of one stage, if `chunk` is given), if there is one."""
        for place, (stage, mb) in enumerate(self.waiting):
            if chunk is None or stage == self.stages[chunk]:
                del self.waiting[place]
                self.jobs.append((W, stage, mb))
                return

    def _next(self, d: int, chunk: int) -> int:
        mb = self.done[d, chunk]
        self.done[d, chunk] += 1
        self.jobs.append((d, self.stages[chunk], mb))
        return mb
