"""The microbatches of a step: made one by one, or cut from a minibatch that is made whole.

What a microbatch holds depends on the seed, the step and its number alone,
never on who asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mpirun.data.microbatches import chunk, samples
from schedgen.util.errors import UsageError

Make = Callable[[Tensor, np.random.Generator], tuple[Any, Any]]


class Minibatch(NamedTuple):
    """`Model.batch` of a model whose minibatch is made whole and then cut.

    make  (text, rng) -> (input, target) of the whole step, any pytrees; `rng` is seeded by the run's seed and the step.
    dims  along which dimension they are cut: a number for all tensors, or a pair of pytrees of numbers, in which None
          stands for what every microbatch gets as it is. Microbatches differ by one sample where they must, the first
          being the larger ones; a sample weighs the same in all.
    check raises UsageError where the model cannot take the leaves of a microbatch's input.
    """

    make: Make
    dims: Any = 0
    check: Callable[[list[Any]], None] | None = None


class Microbatch(NamedTuple):
    leaves: list[Any]  # of the input
    target: Any
    parts: float  # how many of its size the minibatch has


class Microbatches:
    """All of a run."""

    def __init__(self, batch: Make | Minibatch, text: Tensor, seed: int, count: int) -> None:
        """`count`: of a step."""
        self.batch, self.text, self.seed, self.count = batch, text, seed, count
        self.step = -1
        self.pieces: list[Microbatch] = []  # of that step, where it was made whole

    def __call__(self, step: int, number: int) -> Microbatch:
        """One of a step."""
        if not isinstance(self.batch, Minibatch):
            made = self.batch(self.text, np.random.default_rng([self.seed, step, number]))
            if not isinstance(made, tuple) or len(made) != 2:
                raise UsageError(f"the model's batch should return a pair (input, target), not {type(made).__name__}")
            return Microbatch(tree_leaves(made[0]), made[1], self.count)
        if step != self.step:
            whole = self.batch.make(self.text, np.random.default_rng([self.seed, step]))
            if not isinstance(whole, tuple) or len(whole) != 2:
                raise UsageError(f"the minibatch should be a pair (input, target), not {type(whole).__name__}")
            of_all = samples(whole, self.batch.dims)
            pieces = [(*one, samples(one, self.batch.dims)) for one in chunk(whole, self.count, self.batch.dims)]
            self.pieces = [Microbatch(tree_leaves(data), target, of_all / size) for data, target, size in pieces]
            if self.batch.check is not None:
                for piece in self.pieces:
                    self.batch.check(piece.leaves)
            self.step = step
        return self.pieces[number]

    @property
    def tokens(self) -> int:
        """Targets of the first step."""
        several = range(self.count) if isinstance(self.batch, Minibatch) else [0]
        found = 0
        for number in several:
            sizes = [leaf.numel() for leaf in tree_leaves(self(0, number).target) if isinstance(leaf, Tensor)]
            found += max(sizes, default=0)
        return found * (self.count // len(several))

    @property
    def weights(self) -> list[float]:
        """What the losses of a step count by, by microbatch, in their mean."""
        if not isinstance(self.batch, Minibatch):
            return [1 / self.count] * self.count
        return [1 / self(0, number).parts for number in range(self.count)]

    @property
    def sizes(self) -> list[list[Any]]:
        """The shapes and types of every microbatch's input, the first step's."""
        several = range(self.count) if isinstance(self.batch, Minibatch) else [0] * self.count
        return [[tuple(x.shape) if isinstance(x, Tensor) else None for x in self(0, one).leaves] for one in several]


def moved(values: Any, device: torch.device) -> Any:
    """A pytree with its tensors on a device."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), values)
