"""What a stage takes from what it is given, not from the trace: devices, and numbers that depend on the size.

A number that is another for a microbatch with a sample less is looked up by the
shape of a placeholder; new tensors are made where a placeholder is. A region
that has none of these gets one more operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from mpirun.frontend.dynamic_sizes import SHAPES, Count, Real
from mpirun.frontend.subgraphs import attributes, regions


def bind(graph: fx.Graph, state: Mapping[str, Any]) -> None:
    """`state`: what get_attr nodes refer to. A placeholder whose shape shows the size has its SHAPES."""
    known = _known(graph)
    like = _like(graph, state) if known is None else known
    for node in list(graph.nodes):
        for code, _ in regions(node, state):
            if like is not None and _lacks(code.graph, attributes(code)):
                *_, last = [None, *code.graph.find_nodes(op="placeholder")]
                with code.graph.inserting_after(last) if last else code.graph.inserting_before():
                    code.graph.placeholder("like").meta = {key: like.meta[key] for key in (SHAPES,) if key in like.meta}
                node.args = (*node.args, like)
            bind(code.graph, attributes(code))
            for one in code.graph.nodes:  # the rest holds fake tensors
                one.meta = {"stack_trace": one.meta.get("stack_trace")}
            code.recompile()
    if known is not None:
        _look_up(graph, known)
    if like is not None:
        _follow_device(graph, like)


def sized(node: fx.Node, state: Mapping[str, Any]) -> bool:
    """Whether it, or a region that it runs, has numbers that depend on the size."""
    return bool(_numbers(node)) or any(
        sized(one, attributes(code)) for code, _ in regions(node, state) for one in code.graph.nodes
    )


def _known(graph: fx.Graph) -> fx.Node | None:
    return next((node for node in graph.find_nodes(op="placeholder") if node.meta.get(SHAPES)), None)


def _like(graph: fx.Graph, state: Mapping[str, Any]) -> fx.Node | None:
    tensors = [node for node in graph.find_nodes(op="get_attr") if isinstance(state.get(str(node.target)), Tensor)]
    return next(iter([*graph.find_nodes(op="placeholder"), *tensors]), None)


def _lacks(graph: fx.Graph, state: Mapping[str, Any]) -> bool:
    """Whether a region needs an operand that shows the size, or one that shows the device."""
    size = _known(graph) is None and any(sized(node, state) for node in graph.nodes)
    return size or (_like(graph, state) is None and _made(graph, state))


def _made(graph: fx.Graph, state: Mapping[str, Any]) -> bool:
    """Whether it makes tensors on a device that is named."""
    return any(
        _devices(node) or any(_made(code.graph, attributes(code)) for code, _ in regions(node, state))
        for node in graph.nodes
    )


def _look_up(graph: fx.Graph, known: fx.Node) -> None:
    """Make of the numbers that depend on the size what the shape of `known` says."""
    nodes = [node for node in graph.nodes if _numbers(node)]
    found: dict[tuple[type, tuple[float, float]], fx.Node] = {}
    *_, last = graph.find_nodes(op="placeholder")
    if nodes:
        with graph.inserting_after(last):
            which = graph.call_function(size_of, (known, known.meta[SHAPES]))
    for node in nodes:
        for number in _numbers(node):
            if (type(number), number.each) not in found:
                with graph.inserting_after(which):
                    found[type(number), number.each] = graph.call_function(getitem, (number.each, which))
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda one: found[type(one), one.each] if isinstance(one, Count | Real) else one,
        )


def size_of(x: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """Which of two sizes a microbatch has."""
    return shapes.index(tuple(x.shape))


def _numbers(node: fx.Node) -> list[Count | Real]:
    values: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), values.append)
    return [value for value in values if isinstance(value, Count | Real)]


def _devices(node: fx.Node) -> bool:
    return any(isinstance(one, torch.device) for one in [*node.args, *node.kwargs.values()])


def _follow_device(graph: fx.Graph, like: fx.Node) -> None:
    """Make new tensors where the stage's are, not where the example's were."""
    for node in [node for node in graph.nodes if _devices(node)]:
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (like, "device"))

        def there(given: Any) -> Any:
            return device if isinstance(given, torch.device) else given

        node.args = tuple(map(there, node.args))
        node.kwargs = {name: there(given) for name, given in node.kwargs.items()}
