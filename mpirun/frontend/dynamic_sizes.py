"""Two traces of one module, on microbatches of two sizes, as one graph.

What differs between them are numbers, such as the shape of a view.
"""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from mpirun.data.microbatches import Dims, leaf_dims, sample_count
from mpirun.frontend.errors import place
from mpirun.frontend.export_graph import Traced
from mpirun.frontend.split_result import Inputs
from mpirun.frontend.subgraphs import attributes
from schedgen.util.errors import UsageError

SHAPES = "shapes"  # in a node's meta: those of its value for each size, if they differ


class Count(int):
    """A number that is another for another size; itself the example's."""

    each: tuple[int, int]


class Real(float):
    """The same of a floating-point number."""

    each: tuple[float, float]


def fewer(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with a sample less."""
    nested: Any = (args, kwargs) if args and kwargs else args or kwargs
    if sample_count(nested, dims) < 2:
        raise UsageError("dims: the example has one sample, so a smaller microbatch would have none")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found = [
        leaf if dim is None else leaf.narrow(dim, 0, leaf.shape[dim] - 1).contiguous()
        for leaf, dim in zip(leaves, leaf_dims(nested, dims), strict=True)
    ]
    smaller: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(found, spec)
    return smaller


def merged(traced: Traced, other: Traced) -> Traced:
    """The first, which knows of the numbers that differ; `other`: the trace on a sample less."""
    _merge(traced.graph, other.graph, traced.state, other.state)
    return traced._replace(example=Inputs(*traced.example[:2], other.example[:2]))


def _merge(ours: fx.Graph, theirs: fx.Graph, our_state: dict[str, Any], their_state: dict[str, Any]) -> None:
    twins: dict[fx.Node, fx.Node] = {}
    for one, other in zip(ours.nodes, theirs.nodes, strict=False):  # each ends with its only output
        if one.op != other.op or (one.op != "placeholder" and one.target != other.target):
            raise _otherwise(one)
        twins[other] = one
        if one.op == "get_attr":
            _same_state(one, our_state[str(one.target)], their_state[str(one.target)])
        values: list[Any] = []
        fx.node.map_aggregate((other.args, other.kwargs), values.append)
        rest = iter(values)
        one.args, one.kwargs = fx.node.map_aggregate(
            (one.args, one.kwargs), lambda value: _both(one, value, next(rest, None), twins)
        )
        if next(rest, None) is not None:
            raise _otherwise(one)
        shapes = tuple(_shape(node) for node in (one, other))
        if shapes[0] != shapes[1]:
            one.meta[SHAPES] = shapes


def _both(node: fx.Node, value: Any, other: Any, twins: dict[fx.Node, fx.Node]) -> Any:
    """An argument of the example's, and of the smaller one's."""
    if isinstance(value, fx.Node):
        if twins.get(other) is value:
            return value
    elif type(value) is type(other) and value == other:
        return value
    elif type(value) is type(other) and type(value) in (int, float) and node.op != "output":
        number = Count(value) if type(value) is int else Real(value)
        number.each = (value, other)
        return number
    raise _otherwise(node)


def _otherwise(node: fx.Node) -> UsageError:
    where = place(node.prev if node.op == "output" else node)
    return UsageError(f"{where}: does something else for a microbatch with a sample less")


def _same_state(node: fx.Node, value: Any, other: Any) -> None:
    if isinstance(value, fx.GraphModule) and isinstance(other, fx.GraphModule):
        _merge(value.graph, other.graph, *(attributes(one) for one in (value, other)))
    elif value is not other:
        both = isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape
        if not both or not bool(((value == other) | ((value != value) & (other != other))).all()):  # NaN is itself
            raise _otherwise(next(iter(node.users), node))


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None
