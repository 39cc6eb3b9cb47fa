"""Cuts a minibatch into microbatches along the dimensions of its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from schedgen.util.errors import UsageError, clip

ALIGNED = 64  # bytes: the alignment that torch gives to tensors on the CPU
TEXT = str | bytes | None  # numbers, one for each sample, are in tensors; a list of them may be weights of classes
Dims = Any  # an int or None, or a pytree of them: each stands for a leaf, or for all leaves of a part, of the minibatch


def chunk(tree: Any, count: int, dims: Dims = 0) -> list[Any]:
    """Cut a minibatch into `count` microbatches, nested like it; if samples do not divide, the first have one more.

    A list or tuple of strings, one for each sample, is cut as a tensor is. Leaves with None in `dims`, and other values
    that are no tensors, go to every microbatch uncut. UsageError if samples are too few.
    """
    samples = sample_count(tree, dims)
    if samples < count:
        raise UsageError(f"the minibatch has {samples} samples, too few for {count} microbatches")
    by_leaf, spec = pytree.tree_flatten(cut_dims(tree, dims, samples))
    pieces = [_pieces(leaf, count, dim) for leaf, dim in zip(spec.flatten_up_to(tree), by_leaf, strict=True)]
    return [pytree.tree_unflatten([piece[number] for piece in pieces], spec) for number in range(count)]


def _pieces(leaf: Any, count: int, dim: int | None) -> list[Any]:
    if dim is None:
        return [in_own_memory(leaf)] * count
    if isinstance(leaf, Tensor):
        return [in_own_memory(x) for x in leaf.tensor_split(count, dim)]
    return [leaf[numbers[0] : numbers[-1] + 1] for numbers in torch.arange(len(leaf)).tensor_split(count)]


def one_per_sample(samples: int) -> Callable[[Any], bool]:
    """A function: whether a part of a pytree is a list or tuple of `samples` entries that are strings or None."""
    return lambda x: type(x) in (list, tuple) and len(x) == samples > 0 and all(isinstance(value, TEXT) for value in x)


def in_own_memory(x: Any) -> Any:
    """The tensor, copied if not aligned as torch aligns a new one: at other addresses some kernels round differently.

    A tensor that is contiguous and aligned already, or a value that is no tensor, is returned itself.
    """
    if not isinstance(x, Tensor) or (x.is_contiguous() and x.data_ptr() % ALIGNED == 0):
        return x
    return x.clone()


def sample_count(tree: Any, dims: Dims = 0) -> int:
    """The number of samples of a minibatch; UsageError if its tensors have different numbers of them."""
    first: tuple[int, str] | None = None
    for (path, leaf), dim in zip(pytree.tree_leaves_with_path(tree), leaf_dims(tree, dims), strict=True):
        if dim is None:
            continue
        where = f"the minibatch{pytree.keystr(path)}"
        if not -leaf.ndim <= dim < leaf.ndim:
            raise UsageError(f"{where} has {leaf.ndim} dimensions, so there is no dimension {dim}")
        size = leaf.shape[dim]
        if first is None:
            first = size, where
        elif size != first[0]:
            raise UsageError(f"{where} has {size} samples in dimension {dim}, but {first[1]} has {first[0]}")
    if first is None:
        raise UsageError("the minibatch has no tensor that could be cut into microbatches")
    return first[0]


def cut_dims(tree: Any, dims: Dims, samples: int) -> Dims:
    """`dims` with an entry for each leaf of `tree`; a list or tuple of `samples` strings is one leaf.

    UsageError if `dims` are not nested like `tree`.
    """
    of_samples = one_per_sample(samples)
    spec = pytree.tree_structure(tree, is_leaf=of_samples)
    return pytree.tree_unflatten(leaf_dims(tree, dims, of_samples), spec)


def leaf_dims(tree: Any, dims: Dims, is_leaf: Callable[[Any], bool] = lambda x: False) -> list[int | None]:
    """The batch dimension of each leaf; None: it is not cut. UsageError if `dims` are not nested like `tree`.

    `is_leaf`: lists and tuples of which it is true are leaves.
    """
    leaves, spread = pytree.tree_leaves(tree, is_leaf=is_leaf), _spread(tree, dims, is_leaf)
    for dim in spread:
        if dim is not None and type(dim) is not int:
            raise UsageError(f"dims: {dim!r} is neither a dimension nor None")
    return [dim if isinstance(leaf, Tensor | list | tuple) else None for leaf, dim in zip(leaves, spread, strict=True)]


def _spread(tree: Any, dims: Dims, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The entry of `dims` that stands for each leaf; dicts are matched by key."""
    if not isinstance(dims, dict | list | tuple):
        return [dims] * len(pytree.tree_leaves(tree, is_leaf=is_leaf))
    if type(dims) is not type(tree) or len(dims) != len(tree) or is_leaf(tree):
        raise UsageError(f"dims: {clip(repr(dims))} is not nested as the minibatch")
    if isinstance(dims, dict) and isinstance(tree, dict):
        if dims.keys() != tree.keys():
            raise UsageError(f"dims: {clip(repr(dims))} has other keys than the minibatch")
        pairs = [(part, dims[key]) for key, part in tree.items()]
    else:
        pairs = list(zip(tree, dims, strict=True))
    return [dim for part, part_dims in pairs for dim in _spread(part, part_dims, is_leaf)]
