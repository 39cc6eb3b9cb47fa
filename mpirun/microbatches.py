"""A minibatch, nested as it may be, cut into microbatches along its batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from schedgen.errors import UsageError

Dims = Any  # an int or None, or a pytree of them whose leaves stand for whole parts of the minibatch


def chunk(tree: Any, count: int, dim: Dims = 0, replicated: Sequence[str] = ()) -> list[Any]:
    """`count` microbatches, nested as the minibatch.

    `dim`: the batch dimension of all tensors, or of each or of each part of `tree`; None: whole in every
    microbatch, as what is no tensor always is. `replicated`: keys of dicts whose values are whole, too. All
    microbatches have ceil(samples / count) samples, but later ones fewer where these do not suffice.
    """
    if count < 1:
        raise UsageError(f"{count} microbatches: there should be one at least")
    sizes = _sizes(samples(tree, dim, replicated), count)
    leaves, spec = pytree.tree_flatten(tree)
    pieces = [
        [leaf] * count if along is None else leaf.split(sizes, along)
        for leaf, along in zip(leaves, _dims(tree, dim, replicated), strict=True)
    ]
    return [pytree.tree_unflatten(list(one), spec) for one in zip(*pieces, strict=True)]


def samples(tree: Any, dim: Dims = 0, replicated: Sequence[str] = ()) -> int:
    """How many samples a minibatch has."""
    first: tuple[int, str] | None = None
    paths = pytree.tree_leaves_with_path(tree)
    for (path, leaf), along in zip(paths, _dims(tree, dim, replicated), strict=True):
        if along is None:
            continue
        where = f"the minibatch{pytree.keystr(path)}"
        if not -leaf.ndim <= along < leaf.ndim:
            raise UsageError(f"{where} has {leaf.ndim} dimensions, so none is {along}")
        size = leaf.shape[along]
        if first is None:
            first = size, where
        elif size != first[0]:
            raise UsageError(f"{where} has {size} samples in dimension {along}, but {first[1]} has {first[0]}")
    if first is None:
        raise UsageError("the minibatch has no tensor that could be cut into microbatches")
    return first[0]


def _sizes(whole: int, count: int) -> list[int]:
    if whole < count:
        raise UsageError(f"the minibatch has {whole} samples, too few for {count} microbatches")
    most, sizes = -(-whole // count), []
    for later in reversed(range(count)):
        sizes.append(min(most, whole - later))
        whole -= sizes[-1]
    return sizes


def _dims(tree: Any, dim: Dims, replicated: Sequence[str]) -> list[int | None]:
    """The batch dimension of each leaf."""
    paths = pytree.tree_leaves_with_path(tree)
    keys = [{getattr(entry, "key", None) for entry in path} for path, _ in paths]
    for name in replicated:
        if not any(name in found for found in keys):
            raise UsageError(f"replicated: the minibatch has nothing under the key {name!r}")
    try:
        dims = pytree._broadcast_to_and_flatten(dim, pytree.tree_structure(tree))
    except ValueError:
        dims = None
    if dims is None:
        raise UsageError(f"dim: {dim} is not nested as the minibatch, {pytree.tree_structure(tree)}")
    for one in dims:
        if one is not None and not isinstance(one, int):
            raise UsageError(f"dim: {one!r} is neither a dimension nor None")
    return [
        along if isinstance(leaf, Tensor) and found.isdisjoint(replicated) else None
        for (_, leaf), along, found in zip(paths, dims, keys, strict=True)
    ]
