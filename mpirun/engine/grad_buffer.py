"""dw.s on a rank: the gradient of a stage's weights, gathered over backwards and over ranks.

Normally one row, to which every backward adds. In canonical mode a row a
microbatch, added up in that order at the very end, so that every scheme gives
the bits of one process that goes through the microbatches one by one.

Where the weights are divided, backwards add to rows of all of them. Of a part
that the rank owns it has rows apart, which take in its own as soon as they
are complete and what others send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpirun.engine.stage import Stage


class Gradient:
    """Rows of shape (n,), laid out as the stage's weights are."""

    def __init__(self, stage: Stage, keys: Sequence[int], memory: Tensor) -> None:
        """`keys` of the rows, ascending; `memory`: shape (len(keys) * n,), kept."""
        self.stage, self.keys = stage, list(keys)
        self.data = memory.view(len(self.keys), stage.size)
        self.views = {key: stage.views(row) for key, row in zip(self.keys, self.data, strict=True)}
        self.used: tuple[int, Stage] | None = None

    @property
    def total(self) -> Tensor:
        """Where the sum is in the end."""
        return self.data[0]

    def begin(self) -> None:
        self.data.zero_()

    def use(self, key: int, stage: Stage) -> None:
        """Make autograd add to the row of `key`; `stage`: the one computed with, or another version of it."""
        if (key, stage) != self.used:
            self.used = key, stage
            for parameter, view in zip(stage.parameters, self.views[key], strict=True):
                parameter.grad = view

    def add(self, key: int, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of the parameters to the row of `key`; None counts as zero."""
        pairs = [(view, grad) for view, grad in zip(self.views[key], grads, strict=True) if grad is not None]
        if pairs:
            views, given = zip(*pairs, strict=True)
            torch._foreach_add_(views, given)

    def add_rows(self, keys: Sequence[int], rows: Tensor) -> None:
        """Add a partial sum that was received, shape (len(keys), n)."""
        if len(self.keys) == 1:
            self.data += rows
        else:
            self.data[[self.keys.index(key) for key in keys]] += rows

    def add_up(self) -> None:
        """All rows into the first, in the order of their keys."""
        for row in self.data[1:]:
            self.data[0] += row

    def message(self) -> tuple[Tensor, Callable[[], None] | None]:
        """What is sent, and what makes it ready."""
        return self.data, None


class Part:
    """dw.s/k: rows of shape (m,), either apart or what of the rows of all weights lies in the part."""

    def __init__(self, keys: Sequence[int], rows: Sequence[Tensor], within: Gradient | None) -> None:
        """`rows`: by key; `within`: what they are views into."""
        self.keys, self.rows, self.within = list(keys), list(rows), within

    @property
    def total(self) -> Tensor:
        return self.rows[0]

    def begin(self) -> None:
        for row in self.rows:
            row.zero_()

    def add_rows(self, keys: Sequence[int], rows: Tensor) -> None:
        """Add a partial sum that was received, shape (len(keys), m)."""
        places = [0] if len(self.keys) == 1 else [self.keys.index(key) for key in keys]
        for place, row in zip(places, rows, strict=True):
            self.rows[place] += row

    def take(self, whole: Gradient, span: slice) -> None:
        """Add this rank's own sums, the part `span` of the rows of all weights."""
        for key, row in zip(whole.keys, whole.data[:, span], strict=True):
            if key in self.keys:  # others are of sums that it passes on
                self.rows[self.keys.index(key)] += row

    def add_up(self) -> None:
        """All rows into the first, in the order of their keys."""
        for row in self.rows[1:]:
            self.rows[0] += row

    def message(self) -> tuple[Tensor, Callable[[], None] | None]:
        """What is sent, shape (rows, m), and what makes it ready: several rows of a part do not lie in one piece."""
        if len(self.rows) == 1:
            return self.rows[0], None
        packed = torch.empty((len(self.rows), len(self.total)), dtype=self.total.dtype, device=self.total.device)

        def pack() -> None:
            torch.stack(self.rows, out=packed)

        return packed, pack
