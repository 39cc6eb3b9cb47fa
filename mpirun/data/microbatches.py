"""The microbatches of a step: each made by itself, or chunks of a minibatch that is made as a whole.

In, for the command line: the training text, and the run's seed, the step and the microbatch's number. A microbatch
depends on nothing else, so that any rank can make it. Out: a `Microbatch`, the leaves of its input and its target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from mpirun.data.chunks import Dims, chunk, cut_dims, in_own_memory, sample_count
from mpirun.data.values import digest_of, named_leaves
from schedgen.util.errors import UsageError, clip

T = TypeVar("T")
MakeBatch = Callable[[Tensor, np.random.Generator], tuple[Any, Any]]
DATASET = "the dataset's items should be pairs (input, target), (input,) or mappings: collated is"
Shape = tuple[tuple[int, ...] | None, ...]  # of an input's leaves; None: not a tensor


class Minibatch(NamedTuple):
    """`Model.batch` of a model whose minibatch is made as a whole and then cut into microbatches.

    make    (text, rng) -> (input, target) of a step, any pytrees; `rng` is seeded by the run's seed and the step.
    dims    the dimension along which tensors are cut: a number for all, or a pair of pytrees of numbers; tensors with
            None go to every microbatch uncut. A list of strings, one for each sample, is cut as a tensor is.
            If samples do not divide evenly, the first microbatches have one more; all samples have the same weight in
            the loss.
    leaves  the leaves of a microbatch's input in the order in which stages count them; None: that of the pytree, with
            a dict's in sorted order of its keys. UsageError if the model cannot take them.
    """

    make: MakeBatch
    dims: Dims = 0
    leaves: Callable[[Any], Sequence[Any]] | None = None


class Microbatch(NamedTuple):
    """The data of one forward and backward through all stages."""

    leaves: list[Any]  # of the input, as `named_leaves` returns them
    target: Any
    loss_divisor: float  # minibatch's samples / this one's samples: its loss counts 1 / loss_divisor in the mean
    size: int = 0  # its samples with padding; 0: not known
    padding: int = 0  # how many of them, the last ones, do not count
    names: tuple[str, ...] = ()  # of its input's leaves, as `named_leaves` returns them; all microbatches have the same
    target_dims: Dims = None  # as `cut_dims` returns them; None: it was not cut from a minibatch, or `target` is uncut

    @property
    def shape(self) -> Shape:
        """The shape of its input."""
        return tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in self.leaves)

    def check_names(self, first: tuple[str, ...]) -> None:
        """UsageError if the leaves have other names than those of the first microbatch's input."""
        if self.names != first:
            has, had = (clip(", ".join(names)) for names in (self.names, first))
            raise UsageError(f"the input of a microbatch has {has}, but that of the first had {had}")


class MicrobatchSource(ABC):
    """All microbatches of a run, `count` per step."""

    count: int

    @abstractmethod
    def __call__(self, step: int, number: int) -> Microbatch:
        """Microbatch `number` of a step; UsageError if there is none."""

    @abstractmethod
    def examples(self) -> list[Microbatch]:
        """Microbatches of a step, with every size that occurs: all of them, or one if all have the same size."""

    @property
    def tokens(self) -> int:
        """Elements of a step's targets; of a microbatch those of the largest tensor in its target."""
        return sum(self._of_all(tokens))

    @property
    def loss_weights(self) -> list[float]:
        """By microbatch, the weight of its loss in the mean over the minibatch; they sum to 1."""
        return self._of_all(lambda microbatch: 1 / microbatch.loss_divisor)

    @property
    def input_shapes(self) -> list[Shape]:
        """By microbatch of a step, the shape of its input."""
        return self._of_all(lambda microbatch: microbatch.shape)

    def _of_all(self, value: Callable[[Microbatch], T]) -> list[T]:
        values = [value(microbatch) for microbatch in self.examples()]
        return values * (self.count // len(values))


class Microbatches(MicrobatchSource):
    """Microbatches that a model's `batch` makes from a text."""

    def __init__(self, batch: MakeBatch | Minibatch, text: Tensor, seed: int, count: int) -> None:
        """`batch` is the model's; `text`: uint8, shape (bytes,); `count` microbatches a step."""
        self.batch, self.text, self.seed, self.count = batch, text, seed, count
        self.chunked_step = -1  # the step of `chunks`, where `batch` is a Minibatch
        self.chunks: list[Microbatch] = []

    def __call__(self, step: int, number: int) -> Microbatch:
        """Microbatch `number` of a step; UsageError if it is not a pair, or cannot be cut."""
        if isinstance(self.batch, Minibatch):
            if step != self.chunked_step:
                self.chunks = self._chunks(self.batch, step)
                self.chunked_step = step
            return self.chunks[number]
        pair = self.batch(self.text, np.random.default_rng([self.seed, step, number]))
        data, target = pytree.tree_map(in_own_memory, checked_pair(pair, "the model's batch should return"))
        leaves, names = named_leaves(data)
        return Microbatch(leaves, target, self.count, names=names)

    def _chunks(self, batch: Minibatch, step: int) -> list[Microbatch]:
        pair = checked_pair(batch.make(self.text, np.random.default_rng([self.seed, step])), "the minibatch should be")
        samples = sample_count(pair, batch.dims)
        _, target_dims = cut_dims(pair, batch.dims, samples)
        return [
            Microbatch(leaves, target, samples / size, size, 0, names, target_dims)
            for number, (data, target) in enumerate(chunk(pair, self.count, batch.dims))
            for leaves, names in [named_leaves(data if batch.leaves is None else batch.leaves(data))]
            for size in [samples // self.count + (number < samples % self.count)]
        ]

    def examples(self) -> list[Microbatch]:
        """The microbatches of the first step, or its first if `batch` makes one at a time."""
        return [self(0, number) for number in (range(self.count) if isinstance(self.batch, Minibatch) else [0])]


def tokens(microbatch: Microbatch) -> int:
    """The number of elements of the largest tensor in a microbatch's target."""
    leaves = pytree.tree_leaves(microbatch.target)
    return max((x.numel() for x in leaves if isinstance(x, Tensor)), default=0)


def digest(microbatch: Microbatch) -> str:
    """A hash of a microbatch's input and target."""
    leaves, names = named_leaves(microbatch.target)
    return digest_of([*microbatch.leaves, *names, *leaves])


def checked_pair(made: Any, what: str) -> tuple[Any, Any]:
    """`made`, if it is a pair (input, target); else a UsageError that begins with `what`."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(f"{what} a pair (input, target), not {type(made).__name__}")
    return made


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
    """Collated samples, with a dict for each mapping that is not a pytree, such as transformers' BatchEncoding.

    UsageError if a leaf is neither a dense tensor nor a number, text, bytes or None: it could not be cut or moved.
    """

    def known(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return plain(dict(leaf))
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise UsageError(f"the samples have a tensor of layout {leaf.layout}, which cannot be cut: give dense ones")
        if leaf is None or isinstance(leaf, Tensor | Number | np.generic | str | bytes):
            return leaf
        raise UsageError(
            f"the samples have a {type(leaf).__name__}, which could be neither cut nor moved to a device: give "
            "tensors, numbers, strings and None, in tuples, lists and dicts"
        )

    return pytree.tree_map(known, collated)
