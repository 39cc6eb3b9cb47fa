"""The batches of a run, from a dataset: each rank makes the microbatches that its list reads.

In: a dataset, and the numbers of the microbatches that this rank reads. Out: a `Batch` per step. No MPI: every rank has
its own loader. A `MapLoader` makes any step by its number, a `StreamLoader` reads steps in order.

The content of a microbatch depends on the dataset, the seed, the epoch, the step and its number; not on ranks, workers,
or what was read before. This includes random numbers that samples or their collation draw from the global generators of
torch, numpy and Python, which are seeded for each microbatch; for a stream by the epoch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch.utils.data import DataLoader, Dataset

from mpirun.data.load_ahead import items_of, start_worker, states_kept
from mpirun.data.microbatches import Microbatch, Pair, in_own_memory, plain
from mpirun.data.values import named_leaves
from schedgen.util.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """The microbatches that one rank reads of a step."""

    epoch: int
    number: int  # of the step in the epoch
    samples: list[int]  # by microbatch of the step, its samples without padding; 0: it is all padding
    microbatches: dict[int, Microbatch]  # those that this rank reads
    size: int  # samples of a microbatch, with padding
    loader: Loader | None = None  # the loader that made the batch; None: a script made it
    is_last: bool = False  # of its epoch

    def __iter__(self) -> Iterator[Any]:
        """TypeError: it is one thing, not an input and a target."""
        raise TypeError(
            "a loader gives batches, which have what this rank reads: `for batch in loader: run.step(batch)`; for the "
            "samples themselves take a torch DataLoader, and run.step((input, target))"
        )

    @property
    def is_padded_in_part(self) -> bool:
        """Whether a microbatch has both samples and padding."""
        return any(0 < real < self.size for real in self.samples)


class Step(NamedTuple):
    """A step as a worker makes it."""

    samples: int  # without padding
    is_last: bool  # of its epoch
    collated: dict[int, Any]  # by microbatch that this rank reads, its collated samples


def deal(samples: Sequence[T], size: int, microbatches: int, fill: bool = True) -> list[list[T]]:
    """The samples of each microbatch of a step that has from 1 to `size * microbatches` samples.

    All have `size`: the samples fill the first microbatches, then they are repeated from the first one on. Unless
    `fill`, a microbatch that has some samples is not filled up.
    """
    dealt = [range(begin, begin + size) for begin in range(0, size * microbatches, size)]
    if not fill:
        dealt = [places[: max(0, len(samples) - places.start)] or places for places in dealt]
    return [[samples[place % len(samples)] for place in places] for places in dealt]


def real_samples(samples: int, size: int, microbatches: int) -> list[int]:
    """By microbatch of a step with so many samples, how many of its `size` are no padding."""
    return [min(size, max(0, samples - size * number)) for number in range(microbatches)]


def microbatch_of(pair: Pair, collated: Any, samples: int, real: int, size: int) -> Microbatch:
    """A microbatch of a step of `samples` samples, of which it has `real`; `size`: with padding, 0: without."""
    data, target = pytree.tree_map(in_own_memory, pair(collated))
    leaves, names = named_leaves(data)
    size = size or max(real, 1)
    return Microbatch(leaves, target, samples / real if real else math.inf, size, size - real, names)


@dataclass(eq=False)
class Loader(ABC):
    """The batches of a dataset: an iteration goes through an epoch, the next one through the next epoch.

    Only one iteration at a time. Leaving one ends its processes. If a batch of it was trained on, the next one begins
    with the first batch of the next epoch; after a restart it goes on behind the last batch that was trained on.

    UsageError if an argument is wrong, or the dataset has no step.

    microbatches  how many a step has
    reads         those of a step that this rank reads, in this order
    pair          collated samples -> (input, target)
    shuffle       a new order in every epoch
    workers       processes that make the next steps ahead; 0: this one makes them, between the steps
    last          if the last step of an epoch has too few samples: "pad" repeats some, which do not count, "drop"
                  leaves the step out
    collate       a list of samples -> a microbatch, instead of torch's default_collate
    fills         a microbatch that an epoch's last samples fill in part is padded; False: it has these alone
    sampler       the dataset's indices in the order of an epoch, instead of `shuffle`
    batch_sampler lists of such indices, each of a step
    """

    dataset: Any
    microbatch_size: int
    microbatches: int
    reads: Sequence[int]
    pair: Pair
    _: KW_ONLY
    shuffle: bool = False
    seed: int = 0
    workers: int = 0
    last: str = "pad"
    collate: Callable[[list[Any]], Any] | None = None
    fills: bool = True
    sampler: Iterable[int] | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None
    sample_count: int | None = field(init=False, default=None)  # samples of an epoch; None: not known
    epoch: int = field(init=False, default=0)  # of the batch after the last one that was trained on
    step: int = field(init=False, default=0)  # of this batch, in its epoch
    restored: bool = field(init=False, default=False)  # whether that is still the position of a checkpoint
    order_digest: str | None = field(init=False, default=None)  # of a sampler's first epoch; None: there is no sampler

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name, value, least in (
            ("microbatch_size", self.microbatch_size, 1),
            ("workers", self.workers, 0),
            ("seed", self.seed, 0),
        ):
            if type(value) is not int or value < least:
                raise UsageError(f"the loader's {name} is {value}: it should be a whole number of {least} at least")
        if self.last not in ("pad", "drop"):
            raise UsageError(f"last: {self.last!r} is neither 'pad' nor 'drop': all microbatches have one shape")
        orders = [self.shuffle, self.sampler is not None, self.batch_sampler is not None]
        if sum(orders) > 1:
            raise UsageError("shuffle, sampler and batch_sampler each say the order of samples: give one of them")
        self.step_size = self.microbatch_size * self.microbatches  # samples

    def __len__(self) -> int:
        """The steps of an epoch; TypeError if their number is not known."""
        if self.sample_count is None:
            raise TypeError("an IterableDataset has no length")
        return self.sample_count // self.step_size if self.last == "drop" else -(-self.sample_count // self.step_size)

    @property
    def pads_in_part(self) -> bool:
        """Whether it is known that a microbatch of each epoch has both samples and padding."""
        rest = 0 if self.sample_count is None else self.sample_count % self.microbatch_size
        return self.fills and self.last == "pad" and rest > 0

    def __iter__(self) -> Iterator[Batch]:
        """The batches; an exception of the dataset is raised from here, with its own message and traceback."""
        if self.step and not self.restored:  # the last iteration was left within the epoch
            self.epoch, self.step = self.epoch + 1, 0
        with closing(self._batches()) as batches:
            for batch in batches:
                yield batch
                if batch.is_last:
                    self.trained(batch)

    def trained(self, batch: Batch) -> None:
        """Move the position behind this batch, but never back: a script may train again on a batch that it has kept."""
        after = (batch.epoch + 1, 0) if batch.is_last else (batch.epoch, batch.number + 1)
        if after > (self.epoch, self.step):
            (self.epoch, self.step), self.restored = after, False

    @abstractmethod
    def microbatch(self, epoch: int, step: int, number: int) -> Microbatch:
        """Microbatch `number` of any step, the same as in an iteration; UsageError if it cannot be made alone."""

    def state(self) -> dict[str, Any]:
        """The position of the next batch, and the settings that must not change; for JSON."""
        sizes = {"microbatches": self.microbatches, "microbatch_size": self.microbatch_size}
        return {"epoch": self.epoch, "step": self.step, **sizes, **self._unchanging()}

    @contextmanager
    def from_the_start(self) -> Iterator[None]:
        """Inside, iterations begin with the epoch's first batch; afterwards the position is what it was."""
        position = self.epoch, self.step
        self.step = 0
        try:
            yield
        finally:
            self.epoch, self.step = position

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a `state()`; UsageError if other samples would follow."""
        for name, value in self._unchanging().items():
            if state.get(name) != value:
                raise UsageError(
                    f"the data of the checkpoint has {name} {state.get(name)}, but the loader {value}: other samples "
                    "would follow"
                )
        samples = state["step"] * state["microbatches"] * state["microbatch_size"]
        step, rest = divmod(samples, self.step_size)
        if rest:
            raise UsageError(
                f"the data of the checkpoint goes on after {samples} samples of an epoch, which is in the middle of a "
                f"step of {self.step_size} ({self.microbatches} microbatches of {self.microbatch_size})"
            )
        self.epoch, self.step, self.restored = state["epoch"], step, True
        if self.sample_count is not None and step >= len(self):  # where steps are larger, or the last is dropped now
            self.epoch, self.step = self.epoch + 1, 0

    # For subclasses

    @abstractmethod
    def _steps(self, epoch: int, first: int) -> tuple[Dataset[Step], Iterable[int] | None]:
        """The steps of an epoch from `first` on: by the numbers that come with them, or in their order."""

    def _unchanging(self) -> dict[str, Any]:
        return {
            "samples": "stream" if self.sample_count is None else self.sample_count,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "sampler": self.order_digest,
        }

    def _check_samples(self, samples: int) -> None:
        if samples == 0:
            raise UsageError("the dataset is empty")
        if self.last == "drop" and samples < self.step_size:
            raise UsageError(
                f"the dataset has {samples} samples, a step {self.step_size} ({self.microbatches} microbatches of "
                f'{self.microbatch_size}): last="drop" leaves nothing'
            )

    def _batches(self) -> Generator[Batch, None, None]:
        epoch, first, samples = self.epoch, self.step, 0
        size = self.microbatch_size if self.fills else 0
        with closing(self._made(*self._steps(epoch, first))) as made_steps:
            for number in count(first):
                with states_kept():
                    made = next(made_steps, None)
                    samples = made.samples if made is not None else 0
                    if made is None or (self.last == "drop" and samples < self.step_size):
                        break
                    mine = {mb: self._microbatch(mb, samples, of_mb) for mb, of_mb in made.collated.items()}
                real = real_samples(samples, self.microbatch_size, self.microbatches)
                yield Batch(epoch, number, real, mine, size, self, made.is_last)
                if made.is_last:
                    return
        if first == 0:
            self._check_samples(samples)
        if not samples:
            raise UsageError(f"the dataset ended before step {first} of epoch {epoch}, where the run should continue")
        self.epoch, self.step = epoch + 1, 0  # steps are larger than before a restart, or the last is dropped now
        yield from self._batches()

    def _microbatch(self, number: int, samples: int, collated: Any) -> Microbatch:
        """A microbatch of a step from its collated samples; `samples`: of the step, without padding."""
        real = real_samples(samples, self.microbatch_size, self.microbatches)[number]
        padded = self.microbatch_size if self.fills or not real else 0
        return microbatch_of(self.pair, plain(collated), samples, real, padded)

    def _made(self, steps: Dataset[Step], numbers: Iterable[int] | None) -> Generator[Step, None, None]:
        """The steps that torch's DataLoader makes, ahead if there are workers."""
        data: DataLoader[Step] = DataLoader(
            steps,
            batch_size=None,
            sampler=numbers,
            collate_fn=lambda step: step,
            num_workers=self.workers,
            prefetch_factor=1 if self.workers else None,  # by worker
            # So a script needs neither an `if __name__ == "__main__"`, nor data that can be pickled. Workers leave by
            # _exit, which neither finalizes MPI nor runs the exit handlers of the rank.
            multiprocessing_context="fork" if self.workers else None,
            worker_init_fn=start_worker,
            generator=torch.Generator(),  # not the one from which the model draws
        )
        return items_of(data)
