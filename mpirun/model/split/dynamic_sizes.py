"""Microbatches of two sizes: the exports on the example, and on one sample less, are merged into one graph.

The two graphs have the same nodes and differ in numbers only, such as the shape of a view. These become `SizedInt`
and `SizedFloat`; `size_and_device_lookup.py` makes stages choose between them by the shape of an input.
"""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from mpirun.data.chunks import Dims, leaf_dims, sample_count
from mpirun.model.split.errors import line_of_node
from mpirun.model.split.export_graph import ExportedGraph
from mpirun.model.split.module_io import Call, Example
from mpirun.model.split.subgraphs import attributes, same_values
from schedgen.util.errors import UsageError

SHAPES = "shapes"  # in a node's meta: the shapes of its value for both sizes, if they differ


class SizedInt(int):
    """An int that depends on the microbatch's size; its own value is the one for the example."""

    by_size: tuple[int, int]


class SizedFloat(float):
    """The same for a floating-point number."""

    by_size: tuple[float, float]


def smaller_example(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims) -> Call:
    """The example with one sample less; UsageError if that leaves none."""
    nested: Any = (args, kwargs) if args and kwargs else args or kwargs
    if sample_count(nested, dims) < 2:
        raise UsageError("dims: the example has one sample, so a smaller microbatch would have none")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shorter = [
        leaf if dim is None else leaf.narrow(dim, 0, leaf.shape[dim] - 1).contiguous()
        for leaf, dim in zip(leaves, leaf_dims(nested, dims), strict=True)
    ]
    smaller: Call = pytree.tree_unflatten(shorter, spec)
    return smaller


def merge_sizes(exported: ExportedGraph, smaller: ExportedGraph) -> ExportedGraph:
    """`exported`, with marks on the numbers that depend on the size; `smaller`: the export on one sample less.

    UsageError, with the line, if the two differ in more than numbers.
    """
    _merge(exported.graph, smaller.graph, exported.state, smaller.state)
    return exported._replace(example=Example(*exported.example[:2], smaller.example[:2]))


def _merge(graph: fx.Graph, other: fx.Graph, state: dict[str, Any], other_state: dict[str, Any]) -> None:
    """Mark the numbers of `graph` that differ from `other`; `other` and `other_state` are those of the smaller size."""
    node_of: dict[fx.Node, fx.Node] = {}  # by node of the other graph
    for node, twin in zip(graph.nodes, other.nodes, strict=False):  # each graph ends with its only output
        if node.op != twin.op or (node.op != "placeholder" and node.target != twin.target):
            raise _differs(node)
        node_of[twin] = node
        if node.op == "get_attr":
            _merge_attributes(node, state[str(node.target)], other_state[str(node.target)])
        values: list[Any] = []
        fx.node.map_aggregate((twin.args, twin.kwargs), values.append)
        rest = iter(values)
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda value: _merged(node, value, next(rest, None), node_of)
        )
        if next(rest, None) is not None:
            raise _differs(node)
        shapes = _shape(node), _shape(twin)
        if shapes[0] != shapes[1]:
            node.meta[SHAPES] = shapes


def _merged(node: fx.Node, value: Any, other: Any, node_of: dict[fx.Node, fx.Node]) -> Any:
    """An argument of a node, from those of the two graphs."""
    if isinstance(value, fx.Node):
        if node_of.get(other) is value:
            return value
    elif type(value) is type(other) and value == other:
        return value
    elif type(value) is type(other) and type(value) in (int, float) and node.op != "output":
        number = SizedInt(value) if type(value) is int else SizedFloat(value)
        number.by_size = (value, other)
        return number
    raise _differs(node)


def _differs(node: fx.Node) -> UsageError:
    return UsageError(f"{line_of_node(node)}: does something else for a microbatch with a sample less")


def _merge_attributes(node: fx.Node, value: Any, other: Any) -> None:
    if isinstance(value, fx.GraphModule) and isinstance(other, fx.GraphModule):
        _merge(value.graph, other.graph, attributes(value), attributes(other))
    elif not same_values(value, other):
        raise _differs(next(iter(node.users), node))


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None
