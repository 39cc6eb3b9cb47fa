"""The two halves of a backward: gradients of the inputs now, of the weights later.

In the autograd graph of a stage, nodes from which an input can be reached
form the path of the input gradient; beside it hang parts from which only
parameters can be reached. The first half runs the path and keeps the gradient
that arrives at each node with such a part; the second half runs the parts from
there. Nothing is computed twice [Qi et al. 2023, "Zero bubble pipeline
parallelism", section 2.1; the cut is that of torch.distributed.pipelining].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node


class Part(NamedTuple):
    """A node of the path, the gradients that arrived at it, and the parameters that hang on it."""

    node: Node
    arrived: list[Tensor | None]
    parameters: list[nn.Parameter]


class WeightHalf(NamedTuple):
    """What the second half needs. `whole`: the graph's roots and their gradients, where it cannot be cut."""

    parts: list[Part]
    whole: tuple[Sequence[GradientEdge], Sequence[Tensor]] | None


def input_half(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> tuple[list[Tensor | None], WeightHalf]:
    """Gradients of `inputs` (leaves), and what `weight_half` goes on with."""
    if not inputs:
        return [], WeightHalf([], (roots, gradients))
    parts = _parts([root.node for root in roots], inputs, parameters)
    hooks = [part.node.register_prehook(_keep(part)) for part in parts or ()]
    grads = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    return list(grads), WeightHalf(parts or [], (roots, gradients) if parts is None else None)


def weight_half(half: WeightHalf, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Gradients of `parameters`; None for those that are not used."""
    if half.whole is not None:
        roots, gradients = half.whole
        return list(torch.autograd.grad(roots, parameters, gradients, allow_unused=True)) if parameters else []
    found: dict[nn.Parameter, Tensor] = {}
    for node, arrived, some in half.parts:
        edges = [GradientEdge(node, i) for i, one in enumerate(arrived) if one is not None]
        given = [one for one in arrived if one is not None]
        if edges:
            grads = torch.autograd.grad(edges, some, given, allow_unused=True)
            found |= {p: grad for p, grad in zip(some, grads, strict=True) if grad is not None}
    return [found.get(parameter) for parameter in parameters]


def _keep(part: Part) -> Callable[[tuple[Any, ...]], None]:
    def hook(gradients: tuple[Any, ...]) -> None:
        part.arrived[:] = gradients

    return hook


def _parts(roots: Sequence[Node], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Part] | None:
    """The nodes of the path that parameters hang on; None where a parameter hangs on several, or beside the path."""
    ends = {_leaf(x): True for x in inputs}
    owner = {_leaf(parameter): parameter for parameter in parameters}
    order = _children_first(roots)
    on_path: dict[Node, bool] = {}
    below: dict[Node, list[nn.Parameter]] = {}  # of nodes beside the path: the parameters that hang on them
    parts: list[Part] = []
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        on_path[node] = node in ends or any(on_path[child] for child in children)
        mine = [owner[node]] if node in owner else []
        for child in children:
            if not on_path[child]:
                mine += below[child]
        if on_path[node] and mine:
            parts.append(Part(node, [], mine))
        below[node] = mine
    if any(below[root] and not on_path[root] for root in roots):
        return None
    hanging = [parameter for part in parts for parameter in part.parameters]
    return parts if len(set(hanging)) == len(hanging) else None


def _leaf(tensor: Tensor) -> Node:
    """The node at which a leaf's gradient ends."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes of the graph, each behind those it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(root.next_functions))]
        while stack:
            node, children = stack[-1]
            child = next((c for c, _ in children if c is not None and c not in seen), None)
            if child is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
    return order
