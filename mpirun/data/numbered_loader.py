"""Loaders that can make any microbatch of any step by its number: of a map-style dataset, and of a function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from mpirun.data.load_ahead import seed, states_kept
from mpirun.data.loader import Batch, Loader
from mpirun.data.microbatches import Microbatch, checked_pair
from mpirun.data.sampling import Dealt, deal, epoch_order
from schedgen.util.errors import UsageError

Deal = Callable[[int], list[Dealt[int]]]  # of a step: by microbatch, the indices of its samples


class NumberedLoader(Loader):
    """A loader whose microbatches depend on nothing that was read before."""

    @abstractmethod
    def collated(self, step: int, number: int, indices: list[int]) -> Any:
        """The collated samples of a microbatch, which have these indices; `number`: the microbatch's in the step."""

    @abstractmethod
    def _deal(self, epoch: int) -> Deal:
        """How the samples of an epoch's steps are dealt to microbatches."""

    def microbatch(self, epoch: int, step: int, number: int) -> Microbatch:
        """Microbatch `number` of any step, the same as in an iteration."""
        dealt = self._deal(epoch)(step)
        with states_kept():
            collated = _Microbatches(self, epoch).__getitems__((step, number, dealt[number].samples))
        return self._microbatch(collated, dealt[number], sum(one.real for one in dealt))

    def _batches(self) -> Generator[Batch, None, None]:
        epoch, first, deal_step = self.epoch, self.step, self._deal(self.epoch)

        def steps() -> Iterator[int]:
            return iter(count(first) if self.sample_count is None else range(first, len(self)))

        def wanted() -> Iterator[tuple[int, int, list[int]]]:
            for step in steps() if self.reads else ():
                dealt = deal_step(step)
                yield from ((step, number, dealt[number].samples) for number in self.reads)

        with closing(self._made(_Microbatches(self, epoch), len(self.reads), batch_sampler=wanted())) as made:
            for step in steps():
                dealt = deal_step(step)
                real = [one.real for one in dealt]
                with states_kept():
                    mine = {number: self._microbatch(next(made), dealt[number], sum(real)) for number in self.reads}
                is_last = self.sample_count is not None and step == len(self) - 1
                yield Batch(epoch, step, real, mine, self, is_last)


class MapLoader(NumberedLoader):
    """The loader of a dataset with `__len__`, and with `__getitem__` or `__getitems__`."""

    name = "a dataset"

    def __post_init__(self) -> None:
        """Check the arguments, and the dataset's length."""
        super().__post_init__()
        try:
            self.sample_count = len(self.dataset)
        except (TypeError, NotImplementedError):
            kind = type(self.dataset).__name__
            raise UsageError(f"the dataset, a {kind}, has no length: give it __len__") from None
        self._check_samples(self.sample_count)
        self._say_of_last(self.sample_count % self.step_size)

    def collated(self, step: int, number: int, indices: list[int]) -> Any:
        """What `collate` makes of the dataset's items."""
        whole = getattr(self.dataset, "__getitems__", None)
        items = whole(indices) if whole else [self.dataset[index] for index in indices]
        return (self.collate or default_collate)(items)

    def _deal(self, epoch: int) -> Deal:
        order, size = epoch_order(self.sample_count or 0, self.shuffle, self.seed, epoch), self.step_size

        def deal_step(step: int) -> list[Dealt[int]]:
            indices = [int(index) for index in order[step * size : (step + 1) * size]]
            return deal(indices, self.microbatch_size, self.microbatches)

        return deal_step


class FunctionLoader(NumberedLoader):
    """The loader of a function `make(step, microbatch, rng) -> (input, target)`, which has no end."""

    kind, name = "function", "a function that makes microbatches"

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.collate is not None:
            raise UsageError(f"{self.name} leaves nothing to collate")

    def collated(self, step: int, number: int, indices: list[int]) -> Any:
        """What the function returns."""
        return self.dataset(step, number, np.random.default_rng([self.seed, step, number]))

    def _deal(self, epoch: int) -> Deal:
        return lambda step: [Dealt([0] * self.microbatch_size, 0)] * self.microbatches

    def _unchanging(self) -> dict[str, Any]:
        return {**super()._unchanging(), "microbatches": self.microbatches, "microbatch_size": self.microbatch_size}

    def _microbatch(self, collated: Any, dealt: Dealt[Any], real: int) -> Microbatch:
        """As in `Loader`; the size is that of dimension 0 of the input's first tensor that has one."""
        made = super()._microbatch(checked_pair(collated, "the function should return"), dealt, real)
        size = next((len(x) for x in made.leaves if isinstance(x, torch.Tensor) and x.dim()), made.size)
        return made._replace(size=size)


class _Microbatches(Dataset[Any]):
    """The collated microbatches of an epoch."""

    def __init__(self, loader: NumberedLoader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch

    def __getitems__(self, wanted: tuple[int, int, list[int]]) -> Any:
        """`wanted`: step, number of the microbatch, indices of its samples. It seeds the global generators."""
        seed(self.loader.seed, self.epoch, *wanted[:2])
        return self.loader.collated(*wanted)
