"""Cuts a batch into microbatches along dimension 0 of its tensors, and joins pieces again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from schedgen.util.errors import UsageError

ALIGNED = 64  # bytes: the alignment that torch gives to tensors on the CPU
TEXT = str | bytes | None  # numbers, one for each sample, are in tensors; a list of them may be weights of classes


def chunk(tree: Any, count: int, samples: int) -> list[Any]:
    """Cut a batch of `samples` samples into `count` microbatches, nested like it: the `spans`, or else one sample.

    A list or tuple of strings, one for each sample, is cut as a tensor is. Other values go to every microbatch uncut.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=one_per_sample(samples))
    cuts = [span if span.stop > span.start else slice(0, 1) for span in spans(samples, count)]
    pieces = [_pieces(leaf, cuts) for leaf in leaves]
    return [pytree.tree_unflatten([piece[number] for piece in pieces], spec) for number in range(count)]


def spans(samples: int, count: int) -> list[slice]:
    """The samples of each microbatch, whose numbers differ by one at most."""
    ends = [-(-samples * number // count) for number in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def _pieces(leaf: Any, cuts: list[slice]) -> list[Any]:
    if not isinstance(leaf, Tensor | list | tuple):
        return [leaf] * len(cuts)
    return [in_own_memory(leaf[cut]) for cut in cuts]


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
