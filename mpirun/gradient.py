"""dw.s on a rank: weight gradients gathered over backwards and over ranks.

Normally one running sum. In canonical mode the parts are kept apart by
microbatch and added in that order at the very end, so that every scheme gives
the bits of one process that goes through the microbatches one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpirun.stage import Stage


class Gradient:
    """Rows of shape (n,) by key: microbatches in canonical mode, else one row with key `rank`."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.rows: dict[int, Tensor] = {}

    def add_grads(self, key: int, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of the stage's parameters; None counts as zero."""
        first = key not in self.rows
        for view, grad in zip(self.stage.views(self.row(key)), grads, strict=True):
            if grad is not None:
                view.copy_(grad) if first else view.add_(grad)

    def row(self, key: int) -> Tensor:
        """The row of `key`, zero if nothing was added to it."""
        if key not in self.rows:
            self.rows[key] = torch.zeros(self.stage.size, dtype=self.stage.dtype)
        return self.rows[key]

    def add_rows(self, keys: Sequence[int], rows: Tensor) -> None:
        """Add a partial sum that was received, shape (len(keys), n)."""
        for key, row in zip(keys, rows, strict=True):
            if key in self.rows:
                self.rows[key] += row
            else:
                self.rows[key] = row

    def packed(self, keys: Sequence[int]) -> Tensor:
        """The rows in the order of `keys`, one tensor to send, shape (len(keys), n)."""
        if len(keys) == 1:
            return self.rows[keys[0]].unsqueeze(0)
        return torch.stack([self.rows[key] for key in keys])

    def total(self) -> Tensor:
        """The rows added up in the order of their keys, shape (n,)."""
        first, *others = sorted(self.rows)
        total = self.rows[first]
        for key in others:
            total = total + self.rows[key]
        return total
