"""Two traces of one module, on microbatches of two sizes, as one graph.

What differs between them are numbers, such as the shape of a view. In a stage
each is looked up by a shape that differs too.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from mpirun.microbatches import Dims, of_leaves, samples
from mpirun.split.cut import Inputs
from mpirun.split.errors import place
from mpirun.split.trace import Traced
from schedgen.errors import UsageError

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
    if samples(nested, dims) < 2:
        raise UsageError("dims: the example has one sample, so a smaller microbatch would have none")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found = [
        leaf if dim is None else leaf.narrow(dim, 0, leaf.shape[dim] - 1)
        for leaf, dim in zip(leaves, of_leaves(nested, dims), strict=True)
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
        _merge(value.graph, other.graph, *(_attributes(one) for one in (value, other)))
    elif value is not other and not (
        isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape and value.equal(other)
    ):
        raise _otherwise(next(iter(node.users), node))


def _attributes(code: fx.GraphModule) -> dict[str, Any]:
    return {str(node.target): getattr(code, str(node.target)) for node in code.graph.find_nodes(op="get_attr")}


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def look_up(graph: fx.Graph) -> None:
    """Make of the numbers that depend on the size of a microbatch what a placeholder's shape says."""
    sized = [node for node in graph.nodes if _numbers(node)]
    if not sized:
        return
    inputs = graph.find_nodes(op="placeholder")
    known = next((node for node in inputs if node.meta.get(SHAPES)), None)
    if known is None:
        raise UsageError(f"{place(sized[0])}: depends on the size of the microbatch, of which its stage sees nothing")
    few, many = known.meta[SHAPES][1], known.meta[SHAPES][0]
    dim = next(dim for dim, (a, b) in enumerate(zip(many, few, strict=True)) if a != b)
    found: dict[tuple[float, float], fx.Node] = {}
    with graph.inserting_after(inputs[-1]):
        which = graph.call_function(size_of, (known, dim, (many[dim], few[dim])))
    for node in sized:
        for number in _numbers(node):
            if number.each not in found:
                with graph.inserting_after(which):
                    found[number.each] = graph.call_function(getitem, (number.each, which))
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda one: found[one.each] if isinstance(one, Count | Real) else one
        )


def size_of(x: Tensor, dim: int, sizes: tuple[int, int]) -> int:
    """Which of two sizes a microbatch has."""
    return sizes.index(x.shape[dim])


def _numbers(node: fx.Node) -> list[Count | Real]:
    values: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), values.append)
    return [value for value in values if isinstance(value, Count | Real)]
