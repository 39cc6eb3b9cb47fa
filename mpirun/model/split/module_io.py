"""A module's own input and output, in terms of stages: the leaves that stages read, the outputs of the last stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor

from mpirun.data.microbatches import input_and_target
from schedgen.util.errors import UsageError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a module's forward


def bucket_sizes(buckets: Iterable[int]) -> tuple[int, ...]:
    """The sizes that are declared as `buckets`; UsageError if they are none."""
    if not isinstance(buckets, Iterable) or any(type(size) is not int or size < 1 for size in buckets):
        raise UsageError(f"buckets should be sizes, whole numbers of at least 1, not {buckets!r}")
    return tuple(buckets)


def of_bucket(call: Call, size: int) -> Call:
    """A call with `size` in place of that of dimension 1, of the first tensor that has one, in all dimensions but 0."""
    sizes = [x.shape[1] for x in pytree.tree_leaves(call) if isinstance(x, Tensor) and x.dim() > 1]
    if not sizes:
        raise UsageError("buckets are sizes of dimension 1 of the input, but no tensor of the example has one")

    def resized(x: Tensor) -> Tensor:
        return x.new_zeros([*x.shape[:1], *(size if length == sizes[0] else length for length in x.shape[1:])])

    return pytree.tree_map_only(Tensor, resized, call)


class Example(NamedTuple):
    """The input that a module was traced on: every microbatch has its nesting, shapes and types."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # tensors in args and kwargs have no data
    buckets: Mapping[int, Example] = {}  # by size, the inputs that it was traced on; a microbatch has the shapes of one

    def leaves(self, data: Any) -> tuple[Any, ...]:
        """The leaves of a microbatch's input: a tuple of args, a dict of kwargs, (args, kwargs) or the one tensor.

        UsageError if it is not like the example.
        A list, to which a DataLoader collates tuples, stands for a tuple of args if there are several.
        """
        if isinstance(data, list) and len(self.args) > 1:
            data = tuple(data)
        if self.args and self.kwargs:
            if not (isinstance(data, list | tuple) and len(data) == 2 and isinstance(data[1], Mapping)):
                raise UsageError("the batch's input should be (args, kwargs), as in the example of split")
            args, kwargs = data
        elif isinstance(data, Mapping) and not self.args:
            args, kwargs = (), data
        else:
            args, kwargs = data if isinstance(data, tuple) else (data,), {}
        if kwargs.keys() != self.kwargs.keys():
            raise UsageError(f"the batch's inputs are {sorted(kwargs)}, but those of the example {sorted(self.kwargs)}")
        leaves, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in self.kwargs}))
        if structure != pytree.tree_structure((self.args, self.kwargs)):
            raise UsageError("the batch's input is not nested as the example of split, with the same keys in one order")

        def wrong(example: Example) -> list[tuple[str, str, str]]:
            expected = zip(pytree.tree_leaves_with_path((example.args, example.kwargs)), leaves, strict=True)
            parts = [(pytree.keystr(path)[3:], _traced_part(leaf), _traced_part(x)) for (path, x), leaf in expected]
            return [part for part in parts if part[1] != part[2]]

        for name, has, traced in min(map(wrong, self.buckets.values() or [self]), key=len):
            one = f", of one of buckets={(*self.buckets,)}" if self.buckets else ""
            raise UsageError(
                f"input {name} of a microbatch is {has}, but the module was traced on {traced}: every microbatch has "
                f"the example's shapes{one}"
            )
        return tuple(leaves)

    def pair(self, collated: Any) -> tuple[tuple[Any, ...], Any]:
        """The leaves of the input, and the target, of collated samples. UsageError if there is no such input.

        A pair is (input, target). Of a mapping, the example's kwargs are the input, and all of it is the target.
        """
        if not isinstance(collated, Mapping):
            data, target = input_and_target(collated)
            return self.leaves(data), target
        if self.args or not self.kwargs:
            raise UsageError(
                "samples are mappings, but the module was traced on positional arguments: "
                "split(module, {name: tensor}) says which entries are its input"
            )
        return self.leaves({name: collated[name] for name in self.kwargs if name in collated}), collated


class ModuleOutput(NamedTuple):
    """How the module's own output is made from the last stage's outputs."""

    leaves: list[int | None]  # which output of the last stage each leaf is; None: a constant
    constants: list[Any]
    spec: pytree.TreeSpec

    def rebuild(self, outputs: Tensor | tuple[Tensor, ...]) -> Any:
        """The module's output, from what the last stage returned."""
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        leaves = [
            constant if index is None else tensors[index]
            for index, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


def _traced_part(leaf: Any) -> str:
    """The part of an input's leaf that the exported graph is made for: all but the elements of tensors."""
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
