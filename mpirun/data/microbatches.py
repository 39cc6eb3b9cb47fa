"""Microbatches, the run's source of them, what the jobs of a rank read them by, and how a batch is cut into them.

The first job of a pass that reads a microbatch makes it, the last one drops it. `loader.py` makes those of a
dataset, with their padding and divisors. The command line makes one from the training text, and the run's seed, the
step and the microbatch's number. It depends on nothing else, so that any rank can make it. The text is one file, or
modules of Python's own standard library.
"""

from __future__ import annotations

import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from mpirun.data.values import digest_of, named_leaves, to_device
from schedgen.util.errors import UsageError

MakeBatch = Callable[[Tensor, np.random.Generator], tuple[Any, Any]]
Pair = Callable[[Any], tuple[Any, Any]]  # collated samples -> (input, target)
DATASET = "the dataset's items should be pairs (input, target), (input,) or mappings: collated is"
Shape = tuple[tuple[str, tuple[int, ...] | None], ...]  # by leaf of an input, its name and size; None: not a tensor


class Microbatch(NamedTuple):
    """The data of one forward and backward through all stages."""

    leaves: list[Any]  # of the input, as `named_leaves` returns them
    target: Any
    loss_divisor: float  # minibatch's samples / this one's samples: its loss counts 1 / loss_divisor in the mean
    size: int = 0  # its samples with padding; 0: not known
    padding: int = 0  # how many of them, the last ones, do not count
    names: tuple[str, ...] = ()  # of its input's leaves, as `named_leaves` returns them; all microbatches have the same

    @property
    def shape(self) -> Shape:
        """The shape of its input."""
        sizes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in self.leaves]
        return tuple(zip(self.names, sizes, strict=True))


class MicrobatchSource(ABC):
    """All microbatches of a run, `count` per step."""

    count: int
    example: Microbatch  # all have its shape

    @abstractmethod
    def __call__(self, step: int, number: int) -> Microbatch:
        """Microbatch `number` of a step; UsageError if there is none."""


class Microbatches(MicrobatchSource):
    """Microbatches that a model's `batch` makes from a text."""

    def __init__(self, batch: MakeBatch, text: Tensor, seed: int, count: int) -> None:
        """`batch` is the model's; `text`: uint8, shape (bytes,); `count` microbatches a step."""
        self.batch, self.text, self.seed, self.count = batch, text, seed, count

    def __call__(self, step: int, number: int) -> Microbatch:
        """Microbatch `number` of a step; UsageError if it is not a pair."""
        pair = self.batch(self.text, np.random.default_rng([self.seed, step, number]))
        pair = input_and_target(pair, "the model's batch should return a pair (input, target), not")
        data, target = pytree.tree_map(in_own_memory, pair)
        leaves, names = named_leaves(data)
        return Microbatch(leaves, target, self.count, names=names)

    @cached_property
    def example(self) -> Microbatch:  # type: ignore[override]  # mypy takes it for read-only
        """The first one."""
        return self(0, 0)


def tokens(microbatch: Microbatch) -> int:
    """The number of elements of the largest tensor in a microbatch's target."""
    leaves = pytree.tree_leaves(microbatch.target)
    return max((x.numel() for x in leaves if isinstance(x, Tensor)), default=0)


def digest(microbatch: Microbatch) -> str:
    """A hash of a microbatch's input and target."""
    leaves, names = named_leaves(microbatch.target)
    return digest_of([*microbatch.leaves, *names, *leaves])


def input_and_target(collated: Any, what: str = DATASET) -> tuple[Any, Any]:
    """The input and the target of collated samples: a pair, an input without target, or a mapping, which is both.

    UsageError, which begins with `what`, if they are none of these.
    """
    if isinstance(collated, tuple | list) and len(collated) in (1, 2):
        return collated[0], collated[1] if len(collated) == 2 else None
    if isinstance(collated, Mapping):
        return collated, collated
    found = f"{len(collated)} values" if isinstance(collated, tuple | list) else f"a {type(collated).__name__}"
    raise UsageError(f"{what} {found}")


def plain(collated: Any) -> Any:
    """Collated samples, with a dict for each mapping that is not a pytree, such as transformers' BatchEncoding."""
    return pytree.tree_map(lambda leaf: plain(dict(leaf)) if isinstance(leaf, Mapping) else leaf, collated)


def training_text(path: str | None, length: int) -> bytes:
    """The bytes of the file, or of the standard library where `path` is None; UsageError if fewer than `length`."""
    name = path or "the standard library's modules"
    files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))  # 5 MB
    try:
        text = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from None
    if len(text) < length:
        raise UsageError(f"{name}: {len(text)} bytes are too short a text, the model needs {length}")
    return text


@dataclass
class Position:
    """The step that a rank is executing."""

    step: int = 0


class MicrobatchReader:
    """Makes the microbatches that the jobs of a rank read, and keeps them for later jobs."""

    def __init__(self, source: MicrobatchSource, device: torch.device, position: Position) -> None:
        self.source, self.device, self.position = source, device, position
        self.kept: dict[int, Microbatch] = {}  # those that a later job still reads
        self.readers = 0
        self.last_reader: dict[int, int] = {}  # by microbatch
        self.digests: dict[int, str] | None = None  # hashes of those made from now on; None: they are not recorded

    def reader(self, mb: int, keep: bool) -> Callable[[], Microbatch]:
        """A function that reads a microbatch for a job; call `reader` in the order of the jobs.

        `keep`: keep it for later jobs; False for a forward that keeps nothing on the device for its backward.
        """
        self.readers = reader = self.readers + 1
        self.last_reader[mb] = reader

        def read() -> Microbatch:
            batch = self.kept.pop(mb, None)
            if batch is None:
                made = self.source(self.position.step, mb)
                if self.digests is not None:
                    self.digests[mb] = digest(made)
                batch = to_device(made, self.device)
            if keep and self.last_reader[mb] > reader:
                self.kept[mb] = batch
            return batch

        return read

    def forget(self) -> None:
        """Drop the kept microbatches: the next job that reads one makes it again."""
        self.kept.clear()


ALIGNED = 64  # bytes: the alignment that torch gives to tensors on the CPU
TEXT = str | bytes | None  # numbers, one for each sample, are in tensors; a list of them may be weights of classes


def chunk(tree: Any, count: int, samples: int) -> list[Any]:
    """Cut a batch of `samples` samples into `count` microbatches, nested like it: the `spans`, or else one sample.

    A list or tuple of strings, one for each sample, is cut as a tensor is. Other values go to every microbatch uncut.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=one_per_sample(samples))
    cuts = [span if span.stop > span.start else slice(0, 1) for span in spans(samples, count)]
    pieces = [
        [in_own_memory(leaf[cut]) if isinstance(leaf, Tensor | list | tuple) else leaf for cut in cuts]
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([piece[number] for piece in pieces], spec) for number in range(count)]


def spans(samples: int, count: int) -> list[slice]:
    """The samples of each microbatch, whose numbers differ by one at most."""
    ends = [-(-samples * number // count) for number in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def one_per_sample(samples: int) -> Callable[[Any], bool]:
    """A function: whether a part of a pytree is a list or tuple of `samples` entries that are strings or None."""
    return lambda x: type(x) in (list, tuple) and len(x) == samples > 0 and all(isinstance(value, TEXT) for value in x)


def joined(pieces: Sequence[Any]) -> Any:
    """The pieces of a leaf, tensors or lists, joined along dimension 0; of anything else the first."""
    if isinstance(pieces[0], Tensor):
        return torch.cat(list(pieces))
    return type(pieces[0])(chain.from_iterable(pieces)) if isinstance(pieces[0], list | tuple) else pieces[0]


def repeated(tree: Any, samples: int, length: int) -> Any:
    """A batch of `samples` samples, with the same ones in turn behind them, up to `length`."""
    places = [place % samples for place in range(length)]

    def longer(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[places]
        return type(leaf)([leaf[place] for place in places]) if isinstance(leaf, list | tuple) else leaf

    return pytree.tree_map(longer, tree, is_leaf=one_per_sample(samples))


def in_own_memory(x: Any) -> Any:
    """The tensor, copied if not aligned as torch aligns a new one: at other addresses some kernels round differently.

    A tensor that is contiguous and aligned already, or a value that is no tensor, is returned itself.
    """
    if not isinstance(x, Tensor) or (x.is_contiguous() and x.data_ptr() % ALIGNED == 0):
        return x
    return x.clone()


def sample_count(tree: Any) -> int:
    """The number of samples of a batch; UsageError if its tensors have different numbers of them."""
    first: tuple[int, str] | None = None
    for path, leaf in pytree.tree_leaves_with_path(tree):
        if not isinstance(leaf, Tensor):
            continue
        where = f"the batch{pytree.keystr(path)}"
        if not leaf.ndim:
            raise UsageError(f"{where} has no dimensions, so it cannot be cut into microbatches")
        if first is None:
            first = len(leaf), where
        elif len(leaf) != first[0]:
            raise UsageError(f"{where} has {len(leaf)} samples in dimension 0, but {first[1]} has {first[0]}")
    if first is None:
        raise UsageError("the batch has no tensor that could be cut into microbatches")
    return first[0]
