"""Cutting a minibatch, any pytree of tensors, into microbatches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, _broadcast_to_and_flatten, tree_flatten, tree_unflatten

from schedgen.errors import UsageError


def samples(tree: Any, dims: Any = 0) -> int:
    """How many samples its tensors have along their batch dimension.

    dims  that dimension: a number for all tensors, or a pytree of numbers which is the beginning of `tree`'s; None
          stands for what has none and goes to every microbatch as it is, as whatever is no tensor does.
    """
    found: int | None = None
    for leaf, dim in _cut(tree, dims)[0]:
        if dim is not None:
            size = leaf.shape[dim]
            if found not in (None, size):
                raise UsageError(f"the minibatch has tensors of {found} samples and of {size}")
            found = size
    if found is None:
        raise UsageError("the minibatch has no tensor with a batch dimension")
    return found


def chunk(tree: Any, count: int, dims: Any = 0) -> list[Any]:
    """`count` microbatches, views: of as many samples each, or where that cannot be, the first have one more."""
    size = samples(tree, dims)
    if size < count:
        raise UsageError(f"the minibatch has {size} samples, too few for {count} microbatches")
    leaves, spec = _cut(tree, dims)
    parts = [[leaf] * count if dim is None else list(leaf.tensor_split(count, dim)) for leaf, dim in leaves]
    return [tree_unflatten([part[number] for part in parts], spec) for number in range(count)]


def _cut(tree: Any, dims: Any) -> tuple[list[tuple[Any, int | None]], TreeSpec]:
    """The leaves, each with its batch dimension."""
    leaves, spec = tree_flatten(tree)
    given = _broadcast_to_and_flatten(dims, spec)
    if given is None:
        raise UsageError("the minibatch's dims are no beginning of its structure")
    found: list[tuple[Any, int | None]] = []
    for leaf, dim in zip(leaves, given, strict=True):
        if not isinstance(leaf, Tensor) or dim is None:
            found.append((leaf, None))
            continue
        if type(dim) is not int or not -leaf.dim() <= dim < leaf.dim():
            raise UsageError(f"the minibatch cannot be cut along dimension {dim!r} of a tensor of {leaf.dim()}")
        found.append((leaf, dim))
    return found, spec
