"""A minibatch, nested as it may be, cut into microbatches along its batch dimension."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from schedgen.util.errors import UsageError, clip

Dims = Any  # an int or None, or a pytree of them whose leaves stand for whole parts of the minibatch


def chunk(tree: Any, count: int, dims: Dims = 0) -> list[Any]:
    """`count` microbatches, views, nested as the minibatch; if samples do not divide, the first have one more.

    `dims`: the batch dimension of all tensors, or of each or of each part of `tree`; None: whole in every
    microbatch, as what is no tensor always is.
    """
    if count < 1:
        raise UsageError(f"{count} microbatches: there should be one at least")
    size = samples(tree, dims)
    if size < count:
        raise UsageError(f"the minibatch has {size} samples, too few for {count} microbatches")
    leaves, spec = pytree.tree_flatten(tree)
    pieces = [
        [leaf] * count if dim is None else leaf.tensor_split(count, dim)
        for leaf, dim in zip(leaves, of_leaves(tree, dims), strict=True)
    ]
    return [pytree.tree_unflatten([piece[number] for piece in pieces], spec) for number in range(count)]


def samples(tree: Any, dims: Dims = 0) -> int:
    """How many samples a minibatch has."""
    first: tuple[int, str] | None = None
    for (path, leaf), dim in zip(pytree.tree_leaves_with_path(tree), of_leaves(tree, dims), strict=True):
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


def of_leaves(tree: Any, dims: Dims) -> list[int | None]:
    """The batch dimension of each leaf."""
    found = _spread(tree, dims)
    for one in found:
        if one is not None and type(one) is not int:
            raise UsageError(f"dims: {one!r} is neither a dimension nor None")
    leaves = pytree.tree_leaves(tree)
    return [dim if isinstance(leaf, Tensor) else None for leaf, dim in zip(leaves, found, strict=True)]


def _spread(tree: Any, dims: Dims) -> list[Any]:
    """What of `dims` stands for each leaf; dicts go by their keys."""
    if isinstance(dims, dict) and isinstance(tree, dict) and dims.keys() == tree.keys():
        return [one for key, value in tree.items() for one in _spread(value, dims[key])]
    if isinstance(dims, tuple | list) and type(dims) is type(tree) and len(dims) == len(tree):
        return [one for value, of_value in zip(tree, dims, strict=True) for one in _spread(value, of_value)]
    _, spec = pytree.tree_flatten(tree)
    try:
        by_key = isinstance(dims, dict) and isinstance(tree, dict)  # and the keys are others
        found = None if by_key else pytree._broadcast_to_and_flatten(dims, spec)
    except ValueError:
        found = None
    if found is None:
        raise UsageError(f"dims: {clip(repr(dims))} is not nested as the minibatch")
    return found
