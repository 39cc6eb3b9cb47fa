"""Subgraphs of an exported graph: a region under `no_grad` or autocast is a separate graph, which one node runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, getitem
from typing import Any, NamedTuple

from torch import Tensor, fx


class Subgraph(NamedTuple):
    """A subgraph that a node runs, and the operands that it gives to the placeholders."""

    code: fx.GraphModule
    operands: list[Any]

    @property
    def operand_of(self) -> dict[fx.Node, Any]:
        """The operands by placeholder."""
        return dict(zip(self.code.graph.find_nodes(op="placeholder"), self.operands, strict=False))

    @property
    def state(self) -> dict[str, Any]:
        """What the get_attr nodes inside refer to now, by target."""
        return attributes(self.code)


def subgraphs(node: fx.Node, state: Mapping[str, Any]) -> Iterator[Subgraph]:
    """The subgraphs that a node runs; `state`: what the get_attr nodes of the node's graph refer to, by target."""
    for index, argument in enumerate(node.args):
        target = str(argument.target) if isinstance(argument, fx.Node) and argument.op == "get_attr" else ""
        if isinstance(state.get(target), fx.GraphModule):
            yield Subgraph(state[target], list(node.args[index + 1 :]))


def result_inside(node: fx.Node, state: Mapping[str, Any]) -> tuple[fx.Node, dict[fx.Node, Any], dict[str, Any]] | None:
    """For a node that is a result of a subgraph: the node inside, the operands by placeholder, the inner `state`."""
    if node.target is getitem:
        for inside in subgraphs(node.all_input_nodes[0], state):
            results: Any = inside.code.graph.output_node().args[0]
            return results[node.args[1]], inside.operand_of, inside.state
    return None


def any_inside(test: Callable[[fx.Node], object], node: fx.Node, state: Mapping[str, Any]) -> bool:
    """Whether a test holds for a node or for some node of a subgraph that it runs, at any depth."""
    return bool(test(node)) or any(
        any_inside(test, inner, inside.state) for inside in subgraphs(node, state) for inner in inside.code.graph.nodes
    )


def attributes(module: Any, graph: fx.Graph | None = None) -> dict[str, Any]:
    """What the get_attr nodes of a module's graph refer to, by target; `graph`: in place of the module's own."""
    nodes = (graph or module.graph).find_nodes(op="get_attr")
    return {str(node.target): attrgetter(str(node.target))(module) for node in nodes}


def same_values(value: Any, other: Any) -> bool:
    """Whether two attributes are one object, or tensors with the same values; NaN equals NaN."""
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)) or value is other:
        return value is other
    same = (value.shape, value.dtype) == (other.shape, other.dtype)
    return same and bool(((value == other) | ((value != value) & (other != other))).all())
