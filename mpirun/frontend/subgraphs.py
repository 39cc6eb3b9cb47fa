"""Regions of a traced graph, without gradients or under autocast: graphs of their own, which a node runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx


def regions(node: fx.Node, state: Mapping[str, Any]) -> Iterator[tuple[fx.GraphModule, list[Any]]]:
    """Those that a node runs, and what their placeholders are; `state`: what get_attr nodes of its graph refer to."""
    for index, one in enumerate(node.args):
        if isinstance(one, fx.Node) and one.op == "get_attr" and isinstance(state.get(str(one.target)), fx.GraphModule):
            yield state[str(one.target)], list(node.args[index + 1 :])


def attributes(module: Any, graph: fx.Graph | None = None) -> dict[str, Any]:
    """What get_attr nodes of a region, or of a graph to be that of a module, refer to."""
    nodes = (graph or module.graph).find_nodes(op="get_attr")
    return {str(node.target): attribute(module, str(node.target)) for node in nodes}


def attribute(module: Any, name: str) -> Any:
    """Of a module, by its dotted name."""
    owner, _, last = name.rpartition(".")
    return getattr(module.get_submodule(owner), last)
