"""The microbatches of a step: each made by itself, or chunks of a minibatch that is made as a whole.

In, for the command line: the training text, and the run's seed, the step and the microbatch's number. A microbatch
depends on nothing else, so that any rank can make it. Out: a `Microbatch`, the leaves of its input and its target.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from schedgen.util.errors import UsageError, clip

MakeBatch = Callable[[Tensor, np.random.Generator], tuple[Any, Any]]
Shape = tuple[tuple[int, ...] | None, ...]  # of an input's leaves; None: not a tensor
Dims = Any  # an int or None, or a pytree of them: each stands for a leaf, or for all leaves of a part, of the minibatch


class Minibatch(NamedTuple):
    """`Model.batch` of a model whose minibatch is made as a whole and then cut into microbatches.

    make  (text, rng) -> (input, target) of a step, any pytrees; `rng` is seeded by the run's seed and the step.
    dims  the dimension along which tensors are cut: a number for all, or a pair of pytrees of numbers; tensors with
          None go to every microbatch uncut. If samples do not divide evenly, the first microbatches have one more; all
          samples have the same weight in the loss.
    check raises UsageError if the model cannot take the leaves of a microbatch's input.
    """

    make: MakeBatch
    dims: Dims = 0
    check: Callable[[list[Any]], None] | None = None


class Microbatch(NamedTuple):
    """The data of one forward and backward through all stages."""

    leaves: list[Any]  # of the input, flattened as a pytree
    target: Any
    loss_divisor: float  # minibatch's samples / this one's samples: its loss counts 1 / loss_divisor in the mean
    size: int = 0  # its samples with padding, where a loader made it
    padding: int = 0  # how many of them, the last ones, do not count

    @property
    def shape(self) -> Shape:
        """The shape of its input."""
        return tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in self.leaves)


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
        sizes = [tokens(microbatch) for microbatch in self.examples()]
        return sum(sizes) * (self.count // len(sizes))

    @property
    def loss_weights(self) -> list[float]:
        """By microbatch, the weight of its loss in the mean over the minibatch; they sum to 1."""
        divisors = [microbatch.loss_divisor for microbatch in self.examples()]
        return [1 / divisor for divisor in divisors] * (self.count // len(divisors))

    @property
    def input_shapes(self) -> list[Shape]:
        """By microbatch of a step, the shape of its input."""
        shapes = [microbatch.shape for microbatch in self.examples()]
        return shapes * (self.count // len(shapes))


class Microbatches(MicrobatchSource):
    """Microbatches that a model's `batch` makes from a text."""

    def __init__(self, batch: MakeBatch | Minibatch, text: Tensor, seed: int, count: int) -> None:
        """`batch` is the model's; `text`: uint8, shape (bytes,); `count` microbatches a step."""
        self.batch, self.text, self.seed, self.count = batch, text, seed, count
        self.chunked_step = -1  # the step of `chunks`, where `batch` is a Minibatch
        self.chunks: list[Microbatch] = []

    def __call__(self, step: int, number: int) -> Microbatch:
        """Microbatch `number` of a step; UsageError if the model's batch is not a pair, or cannot be cut."""
        if not isinstance(self.batch, Minibatch):
            pair = self.batch(self.text, np.random.default_rng([self.seed, step, number]))
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise UsageError(f"the model's batch should return a pair (input, target), not {type(pair).__name__}")
            return Microbatch(pytree.tree_leaves(pair[0]), pair[1], self.count)
        if step != self.chunked_step:
            self.chunks = self._chunks(self.batch, step)
            self.chunked_step = step
        return self.chunks[number]

    def _chunks(self, batch: Minibatch, step: int) -> list[Microbatch]:
        pair = batch.make(self.text, np.random.default_rng([self.seed, step]))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UsageError(f"the minibatch should be a pair (input, target), not {type(pair).__name__}")
        samples = sample_count(pair, batch.dims)
        chunks = [
            Microbatch(pytree.tree_leaves(data), target, samples / sample_count((data, target), batch.dims))
            for data, target in chunk(pair, self.count, batch.dims)
        ]
        if batch.check is not None:
            for microbatch in chunks:
                batch.check(microbatch.leaves)
        return chunks

    def examples(self) -> list[Microbatch]:
        """Those of the first step."""
        return [self(0, number) for number in (range(self.count) if isinstance(self.batch, Minibatch) else [0])]


def tokens(microbatch: Microbatch) -> int:
    """Elements of the largest tensor in its target."""
    leaves = pytree.tree_leaves(microbatch.target)
    return max((x.numel() for x in leaves if isinstance(x, Tensor)), default=0)


def digest(microbatch: Microbatch) -> str:
    """A hash of its input and target."""
    return digest_of([*microbatch.leaves, *pytree.tree_leaves(microbatch.target)])


def digest_of(leaves: Iterable[Any]) -> str:
    """A hash of values: of the bytes of tensors, and of the repr of anything else."""
    found = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(raw_bytes(leaf).data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def raw_bytes(x: Tensor) -> np.ndarray:
    """The bytes of a tensor's elements in their order, in host memory; no copy if they lie there in that order."""
    dense = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()  # of one element: any strides


def input_and_target(collated: Any) -> tuple[Any, Any]:
    """The input and the target of collated samples: a pair, an input without target, or a mapping, which is both."""
    if isinstance(collated, tuple | list) and len(collated) in (1, 2):
        return collated[0], collated[1] if len(collated) == 2 else None
    if isinstance(collated, Mapping):
        return collated, collated
    found = f"{len(collated)} values" if isinstance(collated, tuple | list) else f"a {type(collated).__name__}"
    raise UsageError(f"the dataset's items should be pairs (input, target), (input,) or mappings: collated is {found}")


def plain(collated: Any) -> Any:
    """Collated samples, with a dict for each mapping that is not a pytree, such as transformers' BatchEncoding.

    UsageError if there is any other such object: it could not be cut, counted or moved to a device.
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


def to_device(values: Any, device: torch.device) -> Any:
    """A pytree with its tensors on a device; for the CPU it is returned as it is."""
    if device.type == "cpu":
        return values

    def copied(x: Tensor) -> Tensor:
        # The host does not wait for a copy of pinned memory.
        host = x.pin_memory() if x.device.type == "cpu" else x
        return host.to(device, non_blocking=True)

    return pytree.tree_map_only(Tensor, copied, values)


def chunk(tree: Any, count: int, dims: Dims = 0) -> list[Any]:
    """`count` microbatches, views, nested as the minibatch; if samples do not divide, the first have one more.

    What has None in `dims`, or is not a tensor, goes to every microbatch uncut. UsageError if samples are too few.
    """
    if count < 1:
        raise UsageError(f"{count} microbatches: there should be one at least")
    samples = sample_count(tree, dims)
    if samples < count:
        raise UsageError(f"the minibatch has {samples} samples, too few for {count} microbatches")
    leaves, spec = pytree.tree_flatten(tree)
    pieces = [
        [leaf] * count if dim is None else leaf.tensor_split(count, dim)
        for leaf, dim in zip(leaves, leaf_dims(tree, dims), strict=True)
    ]
    return [pytree.tree_unflatten([piece[number] for piece in pieces], spec) for number in range(count)]


def sample_count(tree: Any, dims: Dims = 0) -> int:
    """The number of samples of a minibatch; UsageError if its tensors have different numbers of them."""
    first: tuple[int, str] | None = None
    for (path, leaf), dim in zip(pytree.tree_leaves_with_path(tree), leaf_dims(tree, dims), strict=True):
        if dim is None:
            continue
        where = f"the minibatch{pytree.keystr(path)}"
        if not -leaf.ndim <= dim < leaf.ndim:
            raise UsageError(f"{where} has {leaf.ndim} dimensions, so none is {dim}")
        size = leaf.shape[dim]
        if first is None:
            first = size, where
        elif size != first[0]:
            raise UsageError(f"{where} has {size} samples in dimension {dim}, but {first[1]} has {first[0]}")
    if first is None:
        raise UsageError("the minibatch has no tensor that could be cut into microbatches")
    return first[0]


def leaf_dims(tree: Any, dims: Dims) -> list[int | None]:
    """The batch dimension of each leaf; None: it is not cut. UsageError if `dims` are not nested like `tree`."""
    spread = _spread(tree, dims)
    for dim in spread:
        if dim is not None and type(dim) is not int:
            raise UsageError(f"dims: {dim!r} is neither a dimension nor None")
    leaves = pytree.tree_leaves(tree)
    return [dim if isinstance(leaf, Tensor) else None for leaf, dim in zip(leaves, spread, strict=True)]


def _spread(tree: Any, dims: Dims) -> list[Any]:
    """The entry of `dims` that stands for each leaf; dicts are matched by key."""
    if isinstance(dims, dict) and isinstance(tree, dict):
        if dims.keys() == tree.keys():
            return [dim for key, part in tree.items() for dim in _spread(part, dims[key])]
    elif isinstance(dims, tuple | list) and type(dims) is type(tree) and len(dims) == len(tree):
        return [dim for part, part_dims in zip(tree, dims, strict=True) for dim in _spread(part, part_dims)]
    else:
        with suppress(ValueError):
            spread = pytree._broadcast_to_and_flatten(dims, pytree.tree_structure(tree))
            if spread is not None:
                return spread
    raise UsageError(f"dims: {clip(repr(dims))} is not nested as the minibatch")
