"""A loader gives every sample once an epoch, the same on any rank, and leaves no process behind."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

from mpirun.data.dataset_loaders import epoch_order, loader_class
from mpirun.data.loader import Batch, Loader
from mpirun.data.microbatches import input_and_target
from mpirun.training.batches import whole_batch
from schedgen.util.errors import UsageError

QUICK = settings(max_examples=25, deadline=None)
SHAPES = {
    "length": st.integers(1, 40),
    "size": st.integers(1, 4),
    "count": st.integers(1, 5),
    "seed": st.integers(0, 3),
    "last": st.sampled_from(["pad", "drop"]),
    "data": st.data(),
}


class Stream(IterableDataset):
    """The numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((index, index) for index in range(self.length))


class NoisyStream(Stream):
    """Draws from a global generator."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((index, random.randrange(9)) for index in range(self.length))


class Noisy(Dataset):
    """Pairs of an index and random numbers."""

    def __init__(self, length: int = 21) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()).double()) + random.random() + np.random.random()


class Faulty:
    """Fails at an index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 17:
            raise ValueError("sample 17 is broken")
        return index, index


class Whole(Faulty):
    """Gives the samples of a microbatch at once."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(index, index) for index in indices]


def pair(collated: Any) -> tuple[list[Any], Any]:
    data, target = input_and_target(collated)
    return [data], target


def numbers(length: int) -> list[tuple[int, int]]:
    return [(index, index) for index in range(length)]


def loader(dataset: Any, size: int = 2, count: int = 4, reads: Any = None, **options: Any) -> Loader:
    reads = range(count) if reads is None else reads
    return loader_class(dataset)(dataset, size, count, reads, pair, **options)


def shown(batch: Batch) -> Any:
    """All of a batch, comparable."""
    return (
        batch.epoch,
        batch.number,
        batch.samples,
        {number: (x.leaves[0].tolist(), x.target.tolist(), *x[2:]) for number, x in batch.microbatches.items()},
    )


def left() -> list[Any]:
    """Processes of loaders."""
    return multiprocessing.active_children()


@given(kind=st.sampled_from([numbers, Stream]), shuffle=st.booleans(), **SHAPES)
@QUICK
def test_every_sample_once(kind, shuffle, length, size, count, seed, last, data):
    """Whichever ranks read which microbatches; two ranks that read the same one get the same samples."""
    if last == "drop" and length < size * count:
        return
    shuffle = shuffle and kind is numbers
    ranks = [
        loader(kind(length), size, count, data.draw(reads), shuffle=shuffle, seed=seed, last=last)
        for reads in [st.permutations(range(count)), st.lists(st.integers(0, count - 1), unique=True)]
    ]
    for epoch in (0, 1):
        everywhere = [list(rank) for rank in ranks]
        order = list(map(int, epoch_order(length, shuffle, seed, epoch)))
        assert (
            len(everywhere[0])
            == len(everywhere[1])
            == -(-length // (size * count)) - (last == "drop" and length % (size * count) > 0)
        )
        seen: list[int] = []
        for of_all, of_some in zip(*everywhere, strict=True):
            assert shown(of_all)[:3] == shown(of_some)[:3] == (epoch, of_all.number, of_all.samples)
            assert shown(of_all)[3] | shown(of_some)[3] == shown(of_all)[3]
            assert list(of_some.microbatches) == list(ranks[1].reads)
            weights = 0.0
            for number, microbatch in sorted(of_all.microbatches.items()):
                leaf = microbatch.leaves[0].tolist()
                real = len(leaf) - microbatch.padding
                assert (len(leaf), real) == (microbatch.size, of_all.samples[number])
                assert microbatch.loss_divisor == (sum(of_all.samples) / real if real else math.inf)
                assert len(leaf) == size
                assert last != "drop" or not microbatch.padding
                weights += 1 / microbatch.loss_divisor
                seen += leaf[:real]
            assert weights == pytest.approx(1)
        assert seen == order[: len(seen)]
        assert len(seen) == (length - length % (size * count) if last == "drop" else length)


@given(kind=st.sampled_from([numbers, Stream, Noisy]), **SHAPES)
@QUICK
def test_resumed_anywhere(kind, length, size, count, seed, last, data):
    """The state covers the batches that were trained on; a loader that reads other microbatches continues from it."""
    if last == "drop" and length < size * count:
        return
    if kind is Noisy:
        reads = data.draw(st.permutations(range(count)))
    options = {"shuffle": kind is not Stream, "seed": seed, "last": last}
    first = loader(kind(length), size, count, **options)
    batches, states = [], []
    for _ in range(2):
        for batch in first:
            batches.append(shown(batch))
            first.trained(batch)
            states.append(json.loads(json.dumps(first.state())))
    behind = data.draw(st.integers(0, len(states) - 1))
    reads = data.draw(st.permutations(range(count)))
    second = loader(kind(length), size, count, reads, **options)
    second.restore(states[behind])
    rest = []
    while second.epoch < 2:
        rest += map(shown, second)
    assert rest == batches[behind + 1 :]
    if kind is not Stream:
        epoch, number, _, microbatches = batches[behind]
        some = second.microbatch(epoch, number, reads[0])
        assert (some.leaves[0].tolist(), some.target.tolist(), *some[2:]) == microbatches[reads[0]]


@given(
    length=st.integers(1, 60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    behind=st.integers(0, 20),
)
@QUICK
def test_resumed_with_other_steps(length, sizes, counts, behind):
    """Of other microbatches, or of more or fewer: the rest of the epoch and the next one follow in their orders."""
    first, second = (loader(numbers(length), *cut, shuffle=True) for cut in zip(sizes, counts, strict=True))
    steps = list(first)
    first.epoch, first.step = 0, (behind := min(behind, len(steps) - 1))
    samples = behind * first.step_size
    if samples % second.step_size:
        with pytest.raises(UsageError, match=rf"^the data of the checkpoint goes on after {samples} samples of an epo"):
            second.restore(first.state())
        return
    second.restore(first.state())
    seen = [
        index
        for batch in (*second, *second)
        for microbatch in batch.microbatches.values()
        for index in microbatch.leaves[0].tolist()[: microbatch.size - microbatch.padding]
    ]
    assert seen == [*list(epoch_order(length, True, 0, 0))[samples:], *epoch_order(length, True, 0, 1)]


@pytest.mark.parametrize(
    "dataset", [numbers(21), Noisy(), Whole(), Stream(21), NoisyStream(21)], ids=lambda x: type(x).__name__
)
def test_workers(dataset):
    """The same batches for any number of workers, also of random samples; the model's generators are not touched."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    shuffle = not isinstance(dataset, Stream)
    given = []
    for workers in (0, 1, 2)[: 2 if isinstance(dataset, Stream) else 3]:
        some = loader(dataset, reads=[3, 0, 2], shuffle=shuffle, workers=workers)
        given.append([shown(batch) for batch, _ in zip(some, range(7), strict=False)])
        given[-1] += [shown(batch) for batch in some]
    assert len(given[0]) > 3
    assert all(other == given[0] for other in given)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert not left()


def test_one_step_ahead():
    """The next step's samples are prefetched by workers; the state does not count them."""
    made = multiprocessing.get_context("fork").Semaphore(0)

    class Counted(Whole):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
            made.release()
            return super().__getitems__(indices)

    some = loader(Counted(), workers=2)
    batches = iter(some)
    some.trained(next(batches))
    assert all(made.acquire(timeout=60) for _ in range(8))
    assert some.state()["step"] == 1
    batches.close()
    assert not left()


@pytest.mark.parametrize("dataset", [Noisy(), Stream(21)], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
def test_abandoned(dataset, workers):
    """No process stays. If it was trained on, the next iteration is of the next epoch.

    After a restart it goes on after the last trained batch.
    """
    some = loader(dataset, workers=workers)
    for trained in (False, True):
        for batch in some:
            assert (batch.epoch, batch.number) == (0, 0)
            if trained:
                some.trained(batch)
            break
        assert not left()
    state = some.state()
    following = next(iter(some))
    assert (following.epoch, following.number) == (1, 0)
    some.restore(state)
    for _ in range(2):
        ahead = iter(some)
        assert [next(ahead).number for _ in range(2)] == [1, 2]
        del ahead
    some.trained(batch)  # again
    assert (not left(), some.epoch, some.step) == (True, 0, 1)
    some.trained(replace(batch, number=1))
    some.trained(batch)
    assert (some.epoch, some.step) == (0, 2)
    assert ([step.number for step in some], some.epoch, some.step) == ([0, 1, 2], 2, 0)


@given(
    kind=st.sampled_from(["sampler", "batches", "epochs"]),
    length=st.integers(1, 40),
    size=st.integers(1, 4),
    count=st.integers(1, 5),
    seed=st.integers(0, 3),
)
@QUICK
def test_a_sampler_gives_the_order(kind, length, size, count, seed):
    """The same on all ranks, in workers and after a restart; the model's generators are not touched."""
    data, before = numbers(length), torch.get_rng_state()

    def made(reads: list[int]) -> Loader:
        torch.rand(len(reads))
        if kind == "epochs":
            return loader(data, size, count, reads, seed=seed, sampler=ByEpoch(length))
        draws = RandomSampler(data)
        given = {"sampler": draws} if kind == "sampler" else {"batch_sampler": BatchSampler(draws, size * count, False)}
        return loader(data, size, count, reads, seed=seed, **given)

    def read(loaders: list[Loader]) -> list[int]:
        steps = zip(*loaders, strict=True)
        by_number = [dict(item for batch in step for item in batch.microbatches.items()) for step in steps]
        ordered = [microbatch for step in by_number for _, microbatch in sorted(step.items())]
        return [x for mb in ordered for x in mb.target[: size - mb.padding].tolist()]

    first, again = made([*range(count)]), [made([number]) for number in range(count)]
    orders = [read([first]) for _ in range(3)]
    assert [sorted(order) for order in orders] == [[*range(length)]] * 3
    assert [read(again) for _ in range(3)] == orders
    if length > 10:
        assert len({*map(tuple, orders)}) == 3
    restarted = made([*range(count)])
    restarted.restore({**first.state(), "epoch": 2})
    assert read([restarted]) == orders[2]
    assert kind != "epochs" or orders[1] == [(index + 1) % length for index in range(length)]
    torch.set_rng_state(before)


class ByEpoch:
    """The numbers below `length`, turned by the epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return ((index + self.epoch) % self.length for index in range(self.length))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample(workers):
    some = loader(Faulty(), workers=workers)
    with pytest.raises(ValueError, match="sample 17 is broken") as raised:
        for batch in some:
            assert batch.number < 2
            some.trained(batch)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise ValueError(" in text)
    trace = "".join(traceback.format_exception(raised.value))
    assert re.search(rf'File "{re.escape(__file__)}", line {line}, in __getitem__', trace)
    assert some.state()["step"] == 2
    assert not left()


ORDERS = "each say the order of samples: give one of them"
TOO_FEW = 'the dataset has 7 samples, a step 8 (4 microbatches of 2): last="drop" leaves nothing'
ITEMS = "the dataset's items should be pairs (input, target), (input,) or mappings: collated is"


class WithoutLength(Dataset):
    """Only items."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        (numbers(9), {"size": 0}, "the loader's microbatch_size is 0: it should be a whole number of 1 at least"),
        (numbers(9), {"workers": -1}, "the loader's workers is -1: it should be a whole number of 0 at least"),
        (numbers(9), {"seed": -1}, "the loader's seed is -1: it should be a whole number of 0 at least"),
        (numbers(9), {"last": "skip"}, "last: 'skip' is neither 'pad' nor 'drop': all microbatches have one shape"),
        ([], {}, "the dataset is empty"),
        (Stream(0), {}, "the dataset is empty"),
        (numbers(7), {"last": "drop"}, TOO_FEW),
        (Stream(7), {"last": "drop"}, TOO_FEW),
        (WithoutLength(), {}, "the dataset, a WithoutLength, has no length: give it __len__"),
        (
            iter([1]),
            {},
            "a list_iterator is no dataset: give one with __len__ and __getitem__, or a torch IterableDataset",
        ),
        (Stream(9), {"workers": 2}, "2 workers cannot share an IterableDataset: it takes one at most"),
        (Stream(9), {"shuffle": True}, "an IterableDataset cannot be shuffled: its samples come in its own order"),
        (numbers(9), {"sampler": [1], "shuffle": True}, f"shuffle, sampler and batch_sampler {ORDERS}"),
        (numbers(9), {"sampler": [1], "batch_sampler": [[1]]}, f"shuffle, sampler and batch_sampler {ORDERS}"),
        (numbers(9), {"sampler": []}, "the dataset is empty"),
        (numbers(9), {"batch_sampler": []}, "the dataset is empty"),
        (numbers(9), {"batch_sampler": [[1] * 7, [2] * 8]}, "a list of the batch_sampler has 7 indices, but..."),
        (numbers(9), {"batch_sampler": [[1] * 8, [2] * 9]}, "a list of the batch_sampler has 9 indices, but..."),
        ([1, 2], {}, f"{ITEMS} a Tensor"),
        ([(1, 2, 3)], {}, f"{ITEMS} 3 values"),
    ],
    ids=lambda x: None if isinstance(x, dict) else str(x)[:20],
)
def test_mistakes(dataset, options, sentence):
    with pytest.raises(UsageError, match=f"^{re.escape(sentence).replace(re.escape('...'), '.*')}$"):
        list(loader(dataset, **options))


def test_a_stream_from_its_begin():
    with pytest.raises(UsageError, match=r"^an IterableDataset is read in order from its start: no single microbatch"):
        loader(Stream(9)).microbatch(0, 0, 0)
    shorter = loader(Stream(9))
    shorter.restore({**shorter.state(), "step": 3})
    with pytest.raises(
        UsageError, match=r"^the dataset ended before step 3 of epoch 0, where the run should continue$"
    ):
        list(shorter)


@pytest.mark.parametrize(
    ("dataset", "options", "other", "difference"),
    [
        (numbers(21), {"shuffle": True}, {"dataset": numbers(20)}, "samples 21, but the loader 20"),
        (numbers(21), {}, {"dataset": Stream(21)}, "samples 21, but the loader stream"),
        (numbers(21), {"shuffle": True}, {"shuffle": False}, "shuffle True, but the loader False"),
        (numbers(21), {}, {"seed": 1}, "seed 0, but the loader 1"),
        (numbers(21), {}, {"sampler": range(20, -1, -1)}, "sampler None, but the loader [0-9a-f]{64}"),
    ],
    ids=lambda x: x[:12] if isinstance(x, str) else None,
)
def test_other_data_is_refused(dataset, options, other, difference):
    state = loader(dataset, **options).state()
    with pytest.raises(UsageError, match=rf"^the data of the checkpoint has {difference}: other samples would follow$"):
        loader(**{"dataset": dataset, **options, **other}).restore(state)


def test_input_and_target():
    mapping = {"x": 1}
    assert input_and_target([1, 2]) == input_and_target((1, 2)) == (1, 2)
    assert input_and_target((1,)) == (1, None)
    assert input_and_target(mapping) == (mapping, mapping)
    assert whole_batch(torch.zeros(4, 2), 2, pair).microbatches[0].target is None
    for batch, found in ((torch.zeros(4, 2),) * 3, "3 values"), (None, "a NoneType"):
        words = f"the batch should be a pair (input, target), (input,) or a mapping, not {found}"
        with pytest.raises(UsageError, match=re.escape(words)):
            whole_batch(batch, 2, pair)


def test_collate():
    """It takes the samples of a microbatch, and may draw random numbers."""
    some = [
        loader(numbers(8), workers=workers, collate=lambda samples: (torch.tensor(len(samples)), torch.rand(3)))
        for workers in (0, 1)
    ]
    here, in_process = ([shown(batch) for batch in one] for one in some)
    assert here == in_process
    assert Counter(leaf for leaf, *_ in here[0][3].values()) == {2: 4}


# Reads in ranks that send messages meanwhile: three epochs, of which the second is left after a step and then finished.
# Without an argument, a file for what each rank got, the rank is killed while its workers read.
READ = """
import atexit, json, os, random, signal, sys
import numpy as np, torch
from pathlib import Path
from mpi4py import MPI
from mpirun.data.dataset_loaders import MapLoader
from mpirun.data.microbatches import input_and_target
world = MPI.COMM_WORLD
class Noisy:
    def __len__(self):
        return 21
    def __getitem__(self, index):
        return index, float(torch.rand(()).double()) + random.random() + np.random.random()
def pair(collated):
    data, target = input_and_target(collated)
    return [data], target
def numbers(batch):
    return {number: [x.leaves[0].tolist(), x.target.tolist()] for number, x in batch.microbatches.items()}
atexit.register(print, "at exit", flush=True)
loader = MapLoader(Noisy(), 2, 4, [[0, 3, 2], [3, 1]][world.rank], pair, shuffle=True, workers=2)
steps = []
for batch in loader:
    steps.append(numbers(batch))
    if len(sys.argv) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sent, received = np.full(100_000, world.rank), np.empty(100_000, int)
    world.Sendrecv(sent, 1 - world.rank, recvbuf=received, source=1 - world.rank)
    assert (received == 1 - world.rank).all()
for batch in loader:
    steps.append(numbers(batch))
    loader.trained(batch)
    loader.restore(loader.state())  # as after a restart
    break
steps += [numbers(batch) for _ in range(2) for batch in loader]
by_rank = world.gather(steps)
if by_rank:
    Path(sys.argv[1]).write_text(json.dumps(by_rank))
"""


def test_in_ranks(launch, left_behind, tmp_path):
    """Processes forked under MPI read while ranks exchange messages; they neither finalize nor exit as a rank does."""
    result = launch(2, tmp_path / "read.json", program=["-c", READ])
    assert result.code == 0, result.err
    assert result.out.count("at exit") == 2
    by_rank = json.loads((tmp_path / "read.json").read_text())
    assert [len(steps) for steps in by_rank] == [9, 9]
    for rank, steps in enumerate(by_rank):
        assert all(list(map(int, step)) == [[0, 3, 2], [3, 1]][rank] for step in steps)
    for one, other in zip(*by_rank, strict=True):
        assert one["3"] == other["3"]
    for epoch in range(3):
        steps = by_rank[0][3 * epoch : 3 * epoch + 3]
        others = by_rank[1][3 * epoch : 3 * epoch + 3]
        read = [index for step, more in zip(steps, others, strict=True) for index in {**step, **more}.values()]
        assert {index for data, _ in read for index in data} == set(range(21))
    assert not left_behind(result)


def test_a_killed_rank(launch, left_behind):
    """Its workers end, too."""
    result = launch(None, program=["-c", READ])
    assert result.code != 0
    assert not left_behind(result)
