"""Where a stage makes new tensors: on the device of a value that it has, not on that of the example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from mpirun.model.split.subgraphs import any_inside, subgraphs


def insert_device_lookups(graph: fx.Graph, state: Mapping[str, Any]) -> None:
    """Replace devices in a stage's graph and its subgraphs; `state`: what get_attr nodes refer to.

    A subgraph that makes tensors, but has no value of its own that lies on the device, gets one more operand.
    """
    tensors = [node for node in graph.find_nodes(op="get_attr") if isinstance(state.get(str(node.target)), Tensor)]
    like = next(iter([*graph.find_nodes(op="placeholder"), *tensors]), None)
    for node in list(graph.nodes):
        for inside in subgraphs(node, state):
            code = inside.code
            names_device = any(any_inside(_names_device, inner, inside.state) for inner in code.graph.nodes)
            if like is not None and names_device and not code.graph.find_nodes(op="placeholder"):
                with code.graph.inserting_before():
                    code.graph.placeholder("like")
                node.args = (*node.args, like)
            insert_device_lookups(code.graph, inside.state)
            for inner in code.graph.nodes:  # the rest of meta holds fake tensors
                inner.meta = {"stack_trace": inner.meta.get("stack_trace")}
            code.recompile()
    for node in [node for node in graph.nodes if like is not None and _names_device(node)]:
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (like, "device"))

        def replaced(argument: Any) -> Any:
            return device if isinstance(argument, torch.device) else argument

        node.args = tuple(map(replaced, node.args))
        node.kwargs = {name: replaced(argument) for name, argument in node.kwargs.items()}


def _names_device(node: fx.Node) -> bool:
    return any(isinstance(argument, torch.device) for argument in [*node.args, *node.kwargs.values()])
