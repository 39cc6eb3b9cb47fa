"""The loaders of a map-style dataset and of a torch IterableDataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, default_collate

from mpirun.data.load_ahead import seed, set_states, states, states_kept
from mpirun.data.loader import Loader, Step, deal
from mpirun.data.microbatches import Microbatch
from mpirun.data.values import digest_of
from schedgen.util.errors import UsageError


def loader_class(dataset: Any) -> type[Loader]:
    """The class for a map-style dataset or a torch IterableDataset; UsageError if it is neither."""
    if isinstance(dataset, IterableDataset):
        return StreamLoader
    if hasattr(dataset, "__getitem__"):
        return MapLoader
    kind = type(dataset).__name__
    raise UsageError(f"a {kind} is no dataset: give one with __len__ and __getitem__, or a torch IterableDataset")


@lru_cache(2)
def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """The dataset's indices in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(length) if shuffle else range(length)  # type: ignore[return-value]


class MapLoader(Loader):
    """The loader of a dataset with `__len__`, and with `__getitem__` or `__getitems__`."""

    def __post_init__(self) -> None:
        """Check the arguments, and the dataset's length."""
        super().__post_init__()
        try:
            self.sample_count = len(self.dataset)
        except (TypeError, NotImplementedError):
            kind = type(self.dataset).__name__
            raise UsageError(f"the dataset, a {kind}, has no length: give it __len__") from None
        self.last_order: tuple[int, list[int]] = -1, []  # a sampler's, and its epoch
        if self.sampler is not None or self.batch_sampler is not None:
            self.last_order = 0, self._sampled(0)
            self.sample_count, self.order_digest = len(self.last_order[1]), digest_of(self.last_order[1:])
        self._check_samples(self.sample_count)

    def microbatch(self, epoch: int, step: int, number: int) -> Microbatch:
        """Microbatch `number` of any step, the same as in an iteration."""
        with states_kept():
            made = self.made(epoch, step, [number])
            return self._microbatch(number, made.samples, made.collated[number])

    def made(self, epoch: int, step: int, numbers: Sequence[int]) -> Step:
        """These microbatches of a step; seeds the global generators."""
        indices, whole = self._indices(epoch, step), getattr(self.dataset, "__getitems__", None)
        dealt, collated = deal(indices, self.microbatch_size, self.microbatches, self.fills), {}
        for number in numbers:
            seed(self.seed, epoch, step, number)
            items = whole(dealt[number]) if whole else [self.dataset[index] for index in dealt[number]]
            collated[number] = (self.collate or default_collate)(items)
        return Step(len(indices), step == len(self) - 1, collated)

    def order(self, epoch: int) -> Sequence[int]:
        """The dataset's indices in the order of an epoch; UsageError if a sampler gives another number of them."""
        if self.order_digest is None:
            return epoch_order(self.sample_count or 0, self.shuffle, self.seed, epoch)
        if self.last_order[0] != epoch:
            self.last_order = epoch, self._sampled(epoch)
        count = len(self.last_order[1])
        if count != self.sample_count:
            raise UsageError(f"the sampler gives {count} indices for epoch {epoch}, not {self.sample_count} as first")
        return self.last_order[1]

    def _sampled(self, epoch: int) -> list[int]:
        sampler: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        with states_kept():
            seed(self.seed, epoch)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            given = list(sampler)
        if self.batch_sampler is not None:
            sizes = [len(of_step) for of_step in given]
            wrong = [n for n in sizes[:-1] if n != self.step_size] + [n for n in sizes[-1:] if n > self.step_size]
            if wrong:
                step = f"{self.step_size} ({self.microbatches} microbatches of {self.microbatch_size})"
                raise UsageError(f"a list of the batch_sampler has {wrong[0]} indices, but a step {step}")
            given = [index for of_step in given for index in of_step]
        return [int(index) for index in given]

    def _indices(self, epoch: int, step: int) -> list[int]:
        return [int(index) for index in self.order(epoch)[step * self.step_size : (step + 1) * self.step_size]]

    def _steps(self, epoch: int, first: int) -> tuple[Dataset[Step], Iterable[int]]:
        self.order(epoch)  # here, not in each worker
        return _NumberedSteps(self, epoch), range(first, len(self))


class StreamLoader(Loader):
    """The loader of an IterableDataset: every rank reads all samples, and keeps those of its microbatches."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.workers > 1:
            raise UsageError(f"{self.workers} workers cannot share an IterableDataset: it takes one at most")
        if self.shuffle or self.sampler is not None or self.batch_sampler is not None:
            raise UsageError("an IterableDataset cannot be shuffled: its samples come in its own order")

    def microbatch(self, epoch: int, step: int, number: int) -> Microbatch:
        """UsageError: a stream gives no single microbatch."""
        raise UsageError("an IterableDataset is read in order from its start: no single microbatch of it can be made")

    def _steps(self, epoch: int, first: int) -> tuple[Dataset[Step], None]:
        return _StepsInOrder(self, epoch, first), None


class _NumberedSteps(Dataset[Step]):
    def __init__(self, loader: MapLoader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch

    def __getitem__(self, step: int) -> Step:
        return self.loader.made(self.epoch, step, self.loader.reads)


class _StepsInOrder(IterableDataset[Step]):
    """The steps of a stream from `first` on.

    The stream draws from generators that are seeded by seed and epoch, the collation of a microbatch from others, which
    are seeded by step and number, too.
    """

    def __init__(self, loader: StreamLoader, epoch: int, first: int) -> None:
        self.loader, self.epoch, self.first = loader, epoch, first

    def __iter__(self) -> Iterator[Step]:
        loader, size = self.loader, self.loader.step_size
        seed(loader.seed, self.epoch)
        stream = iter(loader.dataset)
        deque(islice(stream, self.first * size), maxlen=0)
        here = list(islice(stream, size))
        for step in count(self.first):
            if not here:
                return
            following = list(islice(stream, size))  # tells whether this step is the last
            of_stream = states()
            dealt, collated = deal(here, loader.microbatch_size, loader.microbatches, loader.fills), {}
            for number in loader.reads:
                seed(loader.seed, self.epoch, step, number)
                collated[number] = (loader.collate or default_collate)(dealt[number])
            is_last = len(following) < size if loader.last == "drop" else not following
            yield Step(len(here), is_last, collated)
            set_states(of_stream)
            here = following
