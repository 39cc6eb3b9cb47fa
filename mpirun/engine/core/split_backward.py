"""BWD_I and BWD_W: a backward in two halves, first the gradients of the inputs, later those of the weights.

In the autograd graph of a stage, the nodes from which an input can be reached form the path of the input gradient.
Beside the path hang branches from which only parameters can be reached. For relu(x W + b), with g the gradient of the
output:

    path       g -> relu -> add -> mm -> x        the first half runs it, and keeps what arrives at add and at mm
                             |      |
    branches                 b      W             the second half runs them from there

Nothing is computed twice [Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.1; the cut is that of
torch.distributed.pipelining].

Autograd runs all that can be reached from its roots, and from add it reaches mm and x. So the second half does not use
nodes of the path as roots, but calls them itself, in two calls of autograd:

    1.  root _CALL; asked for: b, W     a hook of _CALL calls add(...) and mm(...). A node computes only those of its
                                        results that autograd was asked for: add nothing for mm, mm nothing for x
    2.  roots: b, W, with these results adds to the parameters' `grad`; a branch may be longer than one node

Where the graph cannot be cut, as that of a compiled stage, the first half runs all of it and keeps the parameters'
gradients, which the second half adds. A compiled graph may not be kept for a second run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

_LEAF = torch.zeros((), device="cpu", requires_grad=True)
_CALL: Any = _LEAF.view_as(_LEAF).grad_fn  # a graph of one node; a hook before its call calls others


class Branch(NamedTuple):
    """A node of the path, and the branches that hang on it."""

    node: Any  # of autograd; callable
    hanging: list[int]  # which of its results lead to parameters and to no input
    begins: list[GradientEdge]  # where each of these results goes
    parameters: list[nn.Parameter]


class WeightHalf(NamedTuple):
    """What the second half needs: branches or, where the graph cannot be cut, the parameters' gradients.

    If the stage has no inputs, the second half is the whole backward.
    """

    branches: list[tuple[Branch, list[Tensor | None]]]  # with the gradients that arrived at its node; empty: none did
    found: Sequence[Tensor | None] = ()  # by parameter
    whole: tuple[Sequence[GradientEdge], Sequence[Tensor]] | None = None  # the roots and their gradients


def input_half(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> tuple[Sequence[Tensor | None], WeightHalf]:
    """The gradients of `inputs`, which are leaves, from those of the roots; and what `weight_half` continues with."""
    if not inputs:
        return [], WeightHalf([], whole=(roots, gradients))
    branches = _branches([root.node for root in roots], inputs, parameters)
    if branches is None:
        return _uncut(roots, gradients, inputs, parameters)
    half = WeightHalf([])
    for branch in reversed(branches):
        arrived: list[Tensor | None] = []
        # If autograd returned these gradients, hooks on tensors would be left out.
        branch.node.register_prehook(arrived.extend)
        half.branches.append((branch, arrived))
    return _run(roots, gradients, inputs, keep_graph=True), half


def weight_half(half: WeightHalf, parameters: Sequence[nn.Parameter]) -> None:
    """Add the gradients of `parameters` to their `grad`."""
    if half.whole is not None:
        _add_gradients(*half.whole, parameters)
        return
    for parameter, gradient in zip(parameters, half.found, strict=False):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    reached = deque(pair for pair in half.branches if any(gradient is not None for gradient in pair[1]))
    half.branches.clear()
    begins = [edge for branch, _ in reached for edge in branch.begins]
    to = [parameter for branch, _ in reached for parameter in branch.parameters]
    asked = [edge for branch, _ in reached for edge in _asked_with(branch)]
    found: list[Tensor | None] = []

    def call(_: Any) -> None:
        while reached:  # popped, so that what each node has saved is freed
            branch, arrived = reached.popleft()
            results = branch.node(*arrived)
            found.extend(results[k] for k in branch.hanging)

    hook = _CALL.register_prehook(call)
    try:
        _run([GradientEdge(_CALL, 0)], [_LEAF.detach()], (_LEAF, *begins, *asked), keep_graph=True)
    finally:
        hook.remove()
    pairs = [(edge, gradient) for edge, gradient in zip(begins, found, strict=True) if gradient is not None]
    _add_gradients([edge for edge, _ in pairs], [gradient for _, gradient in pairs], to)


def _asked_with(branch: Branch) -> list[GradientEdge]:
    """What a node has to compute besides what hangs on it.

    Torch's GroupNorm of a channels_last tensor crashes on a CPU if it is not asked for the gradient of this tensor.
    """
    if type(branch.node).__name__ != "NativeGroupNormBackward0":
        return []
    x = branch.node._saved_input
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if x.is_contiguous() and not (last and x.is_contiguous(memory_format=last)):  # 1 x 1 maps are both
        return []
    return [GradientEdge(*branch.node.next_functions[0])]


def _uncut(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> tuple[Sequence[Tensor | None], WeightHalf]:
    """As `input_half`, by one backward of the whole graph; `grad` of inputs and parameters stays as it is."""
    leaves = [*inputs, *parameters]
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        _run(roots, gradients, leaves, keep_graph=False, add=True)
        found = [leaf.grad for leaf in leaves]
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad
    return found[: len(inputs)], WeightHalf([], found[len(inputs) :])


def _add_gradients(roots: Sequence[GradientEdge], gradients: Sequence[Tensor], to: Sequence[nn.Parameter]) -> None:
    if to:
        _run(roots, gradients, to, keep_graph=False, add=True)


def _run(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    keep_graph: bool,
    add: bool = False,
) -> Sequence[Tensor | None]:
    """Like torch.autograd.grad, or backward if `add`, but without checks that take as long as small kernels."""
    return _engine_run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=add
    )


def _branches(
    roots: Sequence[Node], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> list[Branch] | None:
    """The branches of the path, each after those that can be reached from it.

    None if the graph cannot be cut: a parameter hangs on several nodes of the path, on a root beside the path, or on a
    torch.autograd.Function, which only autograd can call.
    """
    is_input, by_id = {id(x) for x in inputs}, {id(parameter): parameter for parameter in parameters}
    on_path: dict[Node, bool] = {}  # by finished node
    below: dict[Node, list[nn.Parameter]] = {}
    branches: list[Branch] = []
    entered: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in on_path:
            stack.pop()
            continue
        if node not in entered:
            entered[node] = following = node.next_functions
            if following:
                stack += [child for child, _ in following if child is not None]
                continue
        stack.pop()
        if not entered[node]:  # the node of a leaf
            leaf = id(getattr(node, "variable", None))
            on_path[node] = leaf in is_input
            if leaf in by_id:
                below[node] = [by_id[leaf]]
            continue
        hanging, begins, found = [], [], []
        on_path[node] = False
        for k, (child, number) in enumerate(entered[node]):
            if child is None:
                continue
            if on_path[child]:
                on_path[node] = True
            elif child in below:
                hanging.append(k)
                begins.append(GradientEdge(child, number))
                found += below[child]
        if on_path[node] and hanging:
            branches.append(Branch(node, hanging, begins, found))
        elif hanging:
            below[node] = found
    if any(root in below for root in roots):
        return None
    all_found = [parameter for branch in branches for parameter in branch.parameters]
    once = len(set(all_found)) == len(all_found)
    return branches if once and all(callable(branch.node) for branch in branches) else None
