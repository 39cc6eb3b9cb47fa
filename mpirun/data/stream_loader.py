"""The loader of a torch IterableDataset, whose samples are read in order; and the choice of a dataset's loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from mpirun.data.load_ahead import seed, set_states, states, states_kept
from mpirun.data.loader import Batch, Loader
from mpirun.data.microbatches import Microbatch
from mpirun.data.numbered_loader import FunctionLoader, MapLoader
from mpirun.data.sampling import deal
from schedgen.util.errors import UsageError


def loader_class(dataset: Any) -> type[Loader]:
    """The class for a map-style dataset, a torch IterableDataset, or a function; UsageError if it is none of these."""
    if isinstance(dataset, IterableDataset):
        return StreamLoader
    if hasattr(dataset, "__getitem__"):
        return MapLoader
    if callable(dataset):
        return FunctionLoader
    raise UsageError(
        f"a {type(dataset).__name__} is no dataset: give one with __len__ and __getitem__, a torch IterableDataset, or "
        "a function make(step, microbatch, rng)"
    )


class StreamLoader(Loader):
    """The loader of an IterableDataset: every rank reads all samples, and keeps those of its microbatches."""

    kind, name = "stream", "an IterableDataset"

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.workers > 1:
            raise UsageError(f"{self.workers} workers cannot share {self.name}: it takes one at most")

    def microbatch(self, epoch: int, step: int, number: int) -> Microbatch:
        """UsageError: a stream gives no single microbatch."""
        raise UsageError("an IterableDataset is read in order from its start: no single microbatch of it can be made")

    def _batches(self) -> Generator[Batch, None, None]:
        """The rest of the epoch; a step is known to be the last by the number of samples after it."""
        epoch, first, size = self.epoch, self.step, self.step_size
        drop = self.last == "drop"
        with closing(self._made(_Steps(self, epoch, first), 1, batch_size=None)) as made:
            here = 0
            for step in count(first):
                with states_kept():
                    item = next(made, None)
                if item is None:
                    break
                here, following, collated = item
                if drop and here < size:
                    break
                if is_last := following == 0 or (drop and following < size):
                    self._say_of_last(following or here)
                dealt = deal([None] * here, self.microbatch_size, self.microbatches)
                mine = {number: self._microbatch(collated[number], dealt[number], here) for number in self.reads}
                yield Batch(epoch, step, [one.real for one in dealt], mine, self, is_last)
                if is_last:
                    return
        if first == 0:
            self._check_samples(here)
        if here:  # less than a step, since steps are larger than before a restart, or the last is dropped now
            self.epoch, self.step = epoch + 1, 0
            yield from self._batches()
            return
        raise UsageError(f"the dataset ended before step {first} of epoch {epoch}, where the run should continue")


class _Steps(IterableDataset[Any]):
    """The steps from `first` on: (samples in the step, samples in the next, its collated microbatches by number).

    The stream draws from generators that are seeded by seed and epoch, the collation of a microbatch from others, which
    are seeded by step and number, too.
    """

    def __init__(self, loader: StreamLoader, epoch: int, first: int) -> None:
        self.loader, self.epoch, self.first = loader, epoch, first

    def __iter__(self) -> Iterator[tuple[int, int, dict[int, Any]]]:
        loader, size = self.loader, self.loader.step_size
        seed(loader.seed, self.epoch)
        stream = iter(loader.dataset)
        deque(islice(stream, self.first * size), maxlen=0)
        here = list(islice(stream, size))
        for step in count(self.first):
            if not here:
                return
            following = list(islice(stream, size))
            of_stream = states()
            dealt, collated = deal(here, loader.microbatch_size, loader.microbatches), {}
            for number in loader.reads:
                seed(loader.seed, self.epoch, step, number)
                collated[number] = (loader.collate or default_collate)(dealt[number].samples)
            yield len(here), len(following), collated
            set_states(of_stream)
            here = following
