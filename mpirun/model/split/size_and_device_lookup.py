"""What a stage looks up when it runs, instead of taking it from the export: the microbatch's size, and the device.

Numbers that depend on the size are chosen by the shape of a placeholder; new tensors are made on the device of a
placeholder. A subgraph that has no such placeholder gets one more operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from mpirun.model.split.dynamic_sizes import SHAPES, SizedFloat, SizedInt
from mpirun.model.split.subgraphs import any_inside, subgraphs


def insert_lookups(graph: fx.Graph, state: Mapping[str, Any]) -> None:
    """Insert the lookups into a stage's graph and its subgraphs; `state`: what get_attr nodes refer to.

    A placeholder whose shape tells the size has SHAPES in its meta.
    """
    sized = _sized_placeholder(graph)
    like = _device_node(graph, state) if sized is None else sized
    for node in list(graph.nodes):
        for inside in subgraphs(node, state):
            code = inside.code
            if like is not None and _lacks_operand(code.graph, inside.state):
                *_, last = [None, *code.graph.find_nodes(op="placeholder")]
                with code.graph.inserting_after(last) if last else code.graph.inserting_before():
                    code.graph.placeholder("like").meta = {key: like.meta[key] for key in (SHAPES,) if key in like.meta}
                node.args = (*node.args, like)
            insert_lookups(code.graph, inside.state)
            for inner in code.graph.nodes:  # the rest of meta holds fake tensors
                inner.meta = {"stack_trace": inner.meta.get("stack_trace")}
            code.recompile()
    if sized is not None:
        _look_up_sizes(graph, sized)
    if like is not None:
        _look_up_device(graph, like)


def depends_on_size(node: fx.Node, state: Mapping[str, Any]) -> bool:
    """Whether a node, or a subgraph that it runs, has numbers that depend on the size."""
    return any_inside(_sized_numbers, node, state)


def size_index(x: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """Which of the two sizes a microbatch has: 0 the example's, 1 a sample less."""
    return shapes.index(tuple(x.shape))


def _sized_placeholder(graph: fx.Graph) -> fx.Node | None:
    return next((node for node in graph.find_nodes(op="placeholder") if node.meta.get(SHAPES)), None)


def _device_node(graph: fx.Graph, state: Mapping[str, Any]) -> fx.Node | None:
    """A node whose value lies on the stage's device."""
    tensors = [node for node in graph.find_nodes(op="get_attr") if isinstance(state.get(str(node.target)), Tensor)]
    return next(iter([*graph.find_nodes(op="placeholder"), *tensors]), None)


def _lacks_operand(graph: fx.Graph, state: Mapping[str, Any]) -> bool:
    """Whether a subgraph needs an operand that tells the size, or one that tells the device."""
    size = _sized_placeholder(graph) is None and any(depends_on_size(node, state) for node in graph.nodes)
    return size or (
        _device_node(graph, state) is None and any(any_inside(_names_device, node, state) for node in graph.nodes)
    )


def _look_up_sizes(graph: fx.Graph, sized: fx.Node) -> None:
    """Replace numbers that depend on the size by a choice that the shape of `sized` makes."""
    nodes = [node for node in graph.nodes if _sized_numbers(node)]
    chosen: dict[tuple[type, tuple[float, float]], fx.Node] = {}
    *_, last = graph.find_nodes(op="placeholder")
    if nodes:
        with graph.inserting_after(last):
            index = graph.call_function(size_index, (sized, sized.meta[SHAPES]))
    for node in nodes:
        for number in _sized_numbers(node):
            if (type(number), number.by_size) not in chosen:
                with graph.inserting_after(index):
                    choice = graph.call_function(getitem, (number.by_size, index))
                chosen[type(number), number.by_size] = choice
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda value: chosen[type(value), value.by_size] if isinstance(value, SizedInt | SizedFloat) else value,
        )


def _sized_numbers(node: fx.Node) -> list[SizedInt | SizedFloat]:
    values: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), values.append)
    return [value for value in values if isinstance(value, SizedInt | SizedFloat)]


def _names_device(node: fx.Node) -> bool:
    return any(isinstance(argument, torch.device) for argument in [*node.args, *node.kwargs.values()])


def _look_up_device(graph: fx.Graph, like: fx.Node) -> None:
    """Make new tensors on the device of `like`, not on that of the example."""
    for node in [node for node in graph.nodes if _names_device(node)]:
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (like, "device"))

        def replaced(argument: Any) -> Any:
            return device if isinstance(argument, torch.device) else argument

        node.args = tuple(map(replaced, node.args))
        node.kwargs = {name: replaced(argument) for name, argument in node.kwargs.items()}
