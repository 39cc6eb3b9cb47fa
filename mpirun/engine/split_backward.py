"""BWD_I and BWD_W: a backward in two halves, gradients of the inputs first and of the weights later.

In the autograd graph of a stage, the nodes from which an input can be reached form the path of the input gradient.
Beside the path hang branches from which only parameters can be reached. The first half runs the path and keeps the
gradients that arrive at each node with a branch. The second half runs the branches from there. Nothing is computed
twice [Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.1; the cut is that of
torch.distributed.pipelining].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node


class Branch(NamedTuple):
    """A node of the path, the gradients that arrived at it, and the parameters that hang on it."""

    node: Node
    arrived: list[Tensor | None]
    parameters: list[nn.Parameter]


class WeightHalf(NamedTuple):
    """What the second half needs: branches or, where the graph cannot be cut, its roots and their gradients."""

    branches: list[Branch]
    uncut: tuple[Sequence[GradientEdge], Sequence[Tensor]] | None


def input_half(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> tuple[list[Tensor | None], WeightHalf]:
    """The gradients of `inputs`, which are leaves, from those of the roots; and what `weight_half` continues with."""
    if not inputs:
        return [], WeightHalf([], (roots, gradients))
    branches = _branches([root.node for root in roots], inputs, parameters)
    hooks = [branch.node.register_prehook(_keep_arrived(branch)) for branch in branches or ()]
    grads = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    return list(grads), WeightHalf(branches or [], (roots, gradients) if branches is None else None)


def weight_half(half: WeightHalf, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of `parameters`; None for those that are not used."""
    if half.uncut is not None:
        roots, gradients = half.uncut
        return list(torch.autograd.grad(roots, parameters, gradients, allow_unused=True)) if parameters else []
    by_parameter: dict[nn.Parameter, Tensor] = {}
    for node, arrived, hanging in half.branches:
        edges = [GradientEdge(node, index) for index, gradient in enumerate(arrived) if gradient is not None]
        gradients = [gradient for gradient in arrived if gradient is not None]
        if edges:
            grads = torch.autograd.grad(edges, hanging, gradients, allow_unused=True)
            by_parameter |= {p: grad for p, grad in zip(hanging, grads, strict=True) if grad is not None}
    return [by_parameter.get(parameter) for parameter in parameters]


def _keep_arrived(branch: Branch) -> Callable[[tuple[Any, ...]], None]:
    def hook(gradients: tuple[Any, ...]) -> None:
        branch.arrived[:] = gradients

    return hook


def _branches(
    roots: Sequence[Node], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> list[Branch] | None:
    """The branches of the path.

    None where the graph cannot be cut: a parameter hangs on several nodes of the path, or on a root beside it.
    """
    input_nodes = {_leaf_node(x) for x in inputs}
    parameter_of = {_leaf_node(parameter): parameter for parameter in parameters}
    on_path: dict[Node, bool] = {}
    below: dict[Node, list[nn.Parameter]] = {}  # by node: parameters that it reaches by nodes beside the path only
    branches: list[Branch] = []
    for node in _children_first(roots):
        children = [child for child, _ in node.next_functions if child is not None]
        on_path[node] = node in input_nodes or any(on_path[child] for child in children)
        hanging = [parameter_of[node]] if node in parameter_of else []
        for child in children:
            if not on_path[child]:
                hanging += below[child]
        if on_path[node] and hanging:
            branches.append(Branch(node, [], hanging))
        below[node] = hanging
    if any(below[root] and not on_path[root] for root in roots):
        return None
    all_hanging = [parameter for branch in branches for parameter in branch.parameters]
    return branches if len(set(all_hanging)) == len(all_hanging) else None


def _leaf_node(tensor: Tensor) -> Node:
    """The node at which a leaf's gradient ends."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes of the graph, each after those that it leads to."""
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
