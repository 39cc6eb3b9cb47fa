"""The batches of a run, from a dataset: each rank makes the microbatches that its list reads, ahead of their use.

In: a map-style dataset, a torch IterableDataset, or a function `make(step, microbatch, rng) -> (input, target)`, and
the numbers of the microbatches that this rank reads. Out: a `Batch` per step. No MPI: every rank has its own loader.

The content of a microbatch depends on the dataset, the seed, the epoch, the step and its number; not on ranks, workers,
or what was read before. This includes random numbers that samples or their collation draw from the global generators of
torch, numpy and Python.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from mpirun.data.load_ahead import made_ahead, reading, seeded, start_worker, watched
from mpirun.data.microbatches import Microbatch, plain
from mpirun.data.sampling import Dealt, deal, epoch_order, steps_in
from schedgen.util.errors import UsageError

DREW = (
    "random numbers were drawn while a thread made samples: if samples draw them, though the first ones did not, this "
    "run cannot be repeated: with workers=1 a process makes them"
)
_NAMES = {"map": "a dataset", "stream": "an IterableDataset", "function": "a function that makes microbatches"}


class Batch(NamedTuple):
    """What one rank reads of a step."""

    epoch: int
    number: int  # of the step in the epoch
    # By microbatch of the step, its samples without padding (0: it is all padding). For a function, whose sizes are not
    # known yet, `microbatch_size` each.
    samples: list[int]
    microbatches: dict[int, Microbatch]  # those that this rank reads
    loader: Loader | None = None  # that made the batch; None: there is none


class Loader:
    """Each iteration goes through the rest of the epoch, and the next one begins the next epoch. One at a time.

    `epoch`, `step`: of the batch that comes next. Leaving an iteration ends its thread or processes; the next one goes
    on after the last batch that came out.
    """

    def __init__(
        self,
        dataset: Any,
        microbatch_size: int,
        microbatches: int,
        reads: Sequence[int],
        pair: Callable[[Any], tuple[Sequence[Any], Any]],
        *,
        say: Callable[[str], None],
        shuffle: bool = False,
        seed: int = 0,
        workers: int = 0,
        last: str = "pad",
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """`microbatches`: how many a step has; this rank reads those in `reads`, in this order.

        pair     collated samples -> (leaves of the input, target)
        say      prints a line on what is done with the last step, or on random numbers; it may get a line twice
        workers  processes that make microbatches; 0: a thread does
        last     if the last step of an epoch has too few samples: "pad" repeats some, which do not count, "drop"
                 leaves the step out
        collate  a list of samples -> a microbatch, instead of torch's default_collate

        UsageError if `dataset` is not a dataset, or an argument does not fit it.
        """
        for name, value, least in (("microbatch_size", microbatch_size, 1), ("workers", workers, 0), ("seed", seed, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"the loader's {name} is {value}: it should be a whole number of {least} at least")
        if last not in ("pad", "drop"):
            raise UsageError(f"last: {last!r} is neither 'pad' nor 'drop': all microbatches have one shape")
        self.dataset, self.kind, self.length = dataset, *_kind_and_length(dataset)
        if shuffle and self.kind != "map":
            raise UsageError(f"{_NAMES[self.kind]} cannot be shuffled: its samples come in its own order")
        if workers > 1 and self.kind == "stream":
            raise UsageError(f"{workers} workers cannot share an IterableDataset: it takes one at most")
        if collate is not None and self.kind == "function":
            raise UsageError(f"{_NAMES[self.kind]} leaves nothing to collate")
        self.microbatch_size, self.microbatches = microbatch_size, microbatches
        self.step_size = microbatch_size * microbatches  # samples
        self.reads, self.pair, self.collate, self.say = tuple(reads), pair, collate or default_collate, say
        self.shuffle, self.seed, self.workers, self.last = shuffle, seed, workers, last
        self.epoch = self.step = 0
        if self.length is not None:
            self._check_length(self.length)
            self._say_of_last(self.length % self.step_size)

    def __len__(self) -> int:
        """The steps of an epoch; TypeError if their number is not known."""
        if self.length is None:
            raise TypeError(f"{_NAMES[self.kind]} has no length")
        return steps_in(self.length, self.step_size, self.last == "drop")

    @property
    def pads_in_part(self) -> bool:
        """Whether it is known that a microbatch of each epoch has both samples and padding."""
        return self.last == "pad" and self.length is not None and self.length % self.microbatch_size > 0

    def __iter__(self) -> Iterator[Batch]:
        """The batches; what the dataset raises comes from here, with its own message and place."""
        with closing(self._of_stream() if self.kind == "stream" else self._of_samples()) as batches:
            for batch, is_last in batches:
                self.epoch, self.step = (batch.epoch + 1, 0) if is_last else (batch.epoch, batch.number + 1)
                yield batch

    def microbatch(self, epoch: int, step: int, number: int) -> Microbatch:
        """Microbatch `number` of any step, the same as in an iteration; UsageError for an IterableDataset."""
        if self.kind == "stream":
            raise UsageError(
                "an IterableDataset is read in order from its start: no single microbatch of it can be made"
            )
        dealt = self.deal(self._order(epoch), step)
        collated = _Samples(self, epoch).__getitems__((step, number, dealt[number].samples))
        return self._microbatch(collated, dealt[number], sum(one.real for one in dealt))

    def state(self) -> dict[str, Any]:
        """The position of the next batch, and what must not change; for JSON."""
        return {"epoch": self.epoch, "step": self.step, "microbatches": self.microbatches, **self._unchanging()}

    @contextmanager
    def from_the_start(self) -> Iterator[None]:
        """Inside, iterations are those of the whole epoch; afterwards the loader is where it was."""
        position = self.epoch, self.step
        self.step = 0
        try:
            yield
        finally:
            self.epoch, self.step = position

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state()` was taken; UsageError if other samples would follow."""
        for name, value in self._unchanging().items():
            if state[name] != value:
                raise UsageError(
                    f"the data of the checkpoint has {name} {state[name]}, but the loader {value}: other samples would "
                    "follow"
                )
        step = state["step"]
        if state["microbatches"] != self.microbatches:
            step, rest = divmod(step * state["microbatches"], self.microbatches)
            if rest:
                raise UsageError(
                    f"the data of the checkpoint is at step {state['step']} of {state['microbatches']} microbatches, "
                    f"which is not the begin of a step of {self.microbatches}"
                )
        self.epoch, self.step = state["epoch"], step
        if self.length is not None and step >= len(self):  # where steps are larger, or the last is dropped now
            self.epoch, self.step = self.epoch + 1, 0

    def deal(self, order: Sequence[int], step: int) -> list[Dealt[int]]:
        """By microbatch of a step, the indices of its samples."""
        if self.kind == "function":
            return [Dealt([0] * self.microbatch_size, 0)] * self.microbatches
        indices = [int(index) for index in order[step * self.step_size : (step + 1) * self.step_size]]
        return deal(indices, self.microbatch_size, self.microbatches)

    @contextmanager
    def watching(self, number: int) -> Iterator[None]:
        """Report if item `number` draws random numbers; torch's are looked for only if `number` is a power of 2."""
        with watched(number & (number - 1) == 0) as drew:
            yield
            if drew():
                self.say(DREW)

    def _unchanging(self) -> dict[str, Any]:
        return {
            "samples": self.kind if self.length is None else self.length,
            "microbatch_size": self.microbatch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            **({"microbatches": self.microbatches} if self.kind == "function" else {}),
        }

    def _order(self, epoch: int) -> Sequence[int]:
        return epoch_order(self.length or 0, self.shuffle, self.seed, epoch)

    def _check_length(self, samples: int) -> None:
        """UsageError if an epoch has no step."""
        if samples == 0:
            raise UsageError("the dataset is empty")
        if self.last == "drop" and samples < self.step_size:
            raise UsageError(
                f"the dataset has {samples} samples, a step {self.step_size} ({self.microbatches} microbatches of "
                f'{self.microbatch_size}): last="drop" leaves nothing'
            )

    def _say_of_last(self, samples: int) -> None:
        """Report that the last step of an epoch has only `samples` samples, if it is not full."""
        if samples % self.step_size:
            done = "padded, weight 0" if self.last == "pad" else "dropped"
            length = "" if self.length is None else f" of {self.length} samples"
            name = f"the {type(self.dataset).__name__}{length}"
            self.say(f"{name}: the last step of an epoch has {samples} of {self.step_size}: {done}")

    def _microbatch(self, collated: Any, dealt: Dealt[Any], real: int) -> Microbatch:
        """A `Microbatch` from its collated samples; `real`: samples of the step, without padding."""
        if self.kind == "function" and not (isinstance(collated, tuple) and len(collated) == 2):
            raise UsageError(f"the function should return a pair (input, target), not {type(collated).__name__}")
        leaves, target = self.pair(plain(collated))
        divisor, size = real / dealt.real if dealt.real else math.inf, len(dealt.samples)
        if self.kind == "function":
            size = next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), size)
        return Microbatch(list(leaves), target, divisor, size, dealt.padding)

    def _of_samples(self) -> Generator[tuple[Batch, bool], None, None]:
        """The batches of the rest of the epoch, each with whether it is the last."""
        epoch, first, order = self.epoch, self.step, self._order(self.epoch)
        samples = _Samples(self, epoch)

        def steps() -> Iterator[int]:
            return iter(count(first) if self.length is None else range(first, len(self)))

        def wanted() -> Iterator[tuple[int, int, list[int]]]:
            for step in steps() if self.reads else ():
                dealt = self.deal(order, step)
                yield from ((step, number, dealt[number].samples) for number in self.reads)

        with closing(self._made(samples, len(self.reads), batch_sampler=wanted())) as made:
            for step in steps():
                dealt = self.deal(order, step)
                real = [one.real for one in dealt]
                mine = {number: self._microbatch(next(made), dealt[number], sum(real)) for number in self.reads}
                yield Batch(epoch, step, real, mine, self), self.length is not None and step == len(self) - 1

    def _of_stream(self) -> Generator[tuple[Batch, bool], None, None]:
        """Like _of_samples; the number of samples of the next step tells whether this one is the last."""
        epoch, first, size = self.epoch, self.step, self.step_size
        drop = self.last == "drop"
        with closing(self._made(_Stream(self, epoch, first), 1, batch_size=None)) as made:
            here = 0
            for step, (here, following, collated) in zip(count(first), made, strict=False):
                if drop and here < size:
                    break
                if is_last := following == 0 or (drop and following < size):
                    self._say_of_last(following or here)
                dealt = deal([None] * here, self.microbatch_size, self.microbatches)
                mine = {number: self._microbatch(collated[number], dealt[number], here) for number in self.reads}
                yield Batch(epoch, step, [one.real for one in dealt], mine, self), is_last
                if is_last:
                    return
        if first == 0:
            self._check_length(here)
        raise UsageError(f"the dataset ended before step {first} of epoch {epoch}, where it should go on")

    def _made(self, dataset: _Samples | _Stream, ahead: int, **batches: Any) -> Generator[Any, None, None]:
        """What torch's DataLoader makes of a dataset; `ahead` items are ready, or being made, before they are used."""
        seed = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0])
        workers = self.workers if ahead else 0
        data: DataLoader[Any] = DataLoader(
            dataset,
            collate_fn=lambda made: made,
            num_workers=workers,
            prefetch_factor=ahead // workers + 1 if workers else None,
            # So a script needs neither an `if __name__ == "__main__"`, nor data that can be pickled. Workers leave by
            # _exit, which neither finalizes MPI nor runs the exit handlers of the rank.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=start_worker,
            generator=torch.Generator().manual_seed(seed),  # not the one from which the model draws
            **batches,
        )
        return made_ahead(data, ahead, dataset.may_be_made_by_thread)


class _Samples(Dataset[Any]):
    """A map-style dataset or a function, of which an item is a collated microbatch."""

    def __init__(self, loader: Loader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch
        self.seeded = True  # False in a thread: the generators are the whole process's
        self.drew = False
        self.made = 0  # by a thread

    def __getitems__(self, wanted: tuple[int, int, list[int]]) -> Any:
        """`wanted`: step, number of the microbatch, indices of its samples."""
        if not self.seeded:
            self.made += 1
            with reading(), self.loader.watching(self.made):
                return self.make(*wanted)
        with reading(), seeded(self.loader.seed, self.epoch, *wanted[:2]) as drew:
            made = self.make(*wanted)
            self.drew = drew()
        return made

    def make(self, step: int, number: int, indices: list[int]) -> Any:
        dataset = self.loader.dataset
        if self.loader.kind == "function":
            return dataset(step, number, np.random.default_rng([self.loader.seed, step, number]))
        whole = getattr(dataset, "__getitems__", None)
        return self.loader.collate(whole(indices) if whole else [dataset[index] for index in indices])

    def may_be_made_by_thread(self, drew: bool) -> bool:
        self.seeded = drew or self.drew
        if self.seeded:
            self.loader.say(
                "samples draw random numbers, so they are made between the steps: with workers=1 a process makes them"
            )
        return not self.seeded


class _Stream(IterableDataset[Any]):
    """An IterableDataset whose items are steps: counts of its samples and of the next's, its microbatches by number."""

    def __init__(self, loader: Loader, epoch: int, first: int) -> None:
        self.loader, self.epoch, self.first = loader, epoch, first

    def __iter__(self) -> Iterator[tuple[int, int, dict[int, Any]]]:
        loader, size = self.loader, self.loader.step_size
        watching = loader.watching if get_worker_info() is None else lambda number: nullcontext()
        with reading():
            stream = iter(loader.dataset)
            deque(islice(stream, self.first * size), maxlen=0)
            here = list(islice(stream, size))
        for number in count():
            if not here:
                return
            with reading(), watching(number) if number else nullcontext():  # `made_ahead` checks the first
                following = list(islice(stream, size))
                dealt = deal(here, loader.microbatch_size, loader.microbatches)
                collated = {n: self._collate(self.first + number, n, dealt[n].samples) for n in loader.reads}
            yield len(here), len(following), collated
            here = following

    def _collate(self, step: int, number: int, samples: list[Any]) -> Any:
        """In a worker it draws the same whatever was drawn before, and leaves the stream's generators as they were."""
        loader = self.loader
        with nullcontext() if get_worker_info() is None else seeded(loader.seed, self.epoch, step, number):
            return loader.collate(samples)

    def may_be_made_by_thread(self, drew: bool) -> bool:
        if drew:
            raise UsageError(
                "the IterableDataset draws from the global random numbers, which a thread would share with the model: "
                "with workers=1 a process reads it"
            )
        return True


def _kind_and_length(dataset: Any) -> tuple[str, int | None]:
    """A key of _NAMES, and the samples of a map-style dataset."""
    if isinstance(dataset, IterableDataset):
        return "stream", None
    name = type(dataset).__name__
    if hasattr(dataset, "__getitem__"):
        try:
            return "map", len(dataset)
        except (TypeError, NotImplementedError):
            raise UsageError(f"the dataset, a {name}, has no length: give it __len__") from None
    if callable(dataset):
        return "function", None
    raise UsageError(
        f"a {name} is no dataset: give one with __len__ and __getitem__, a torch IterableDataset, or a function "
        "make(step, microbatch, rng)"
    )
