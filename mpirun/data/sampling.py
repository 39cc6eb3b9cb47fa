"""Which samples are in which microbatch of which step. Pure functions of numbers: every rank finds the same.

In: the dataset's length, the seed and the epoch, and how a step is cut. Out: the order of the epoch, and a step's
samples dealt to its microbatches. A step of `count` microbatches of `size` has the next `size * count` of the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class Dealt(NamedTuple, Generic[T]):
    """A microbatch's samples, the last `padding` of them repeated ones that do not count."""

    samples: list[T]
    padding: int

    @property
    def real(self) -> int:
        """How many samples count."""
        return len(self.samples) - self.padding


@lru_cache(2)
def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """The dataset's indices in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(length) if shuffle else range(length)  # type: ignore[return-value]


def deal(samples: Sequence[T], size: int, count: int) -> list[Dealt[T]]:
    """The `count` microbatches of a step that has from 1 to `size * count` samples.

    All have `size` samples: the real ones fill the first microbatches, then the step's first samples are repeated.
    """
    real = len(samples)
    return [
        Dealt([samples[place % real] for place in range(end - size, end)], min(size, max(0, end - real)))
        for end in range(size, size * count + 1, size)
    ]
