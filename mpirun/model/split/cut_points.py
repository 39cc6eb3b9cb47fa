"""Where a graph is cut: at pipe_split(), where submodules begin, or so that stages are balanced and send little.

Out: the nodes of the body that begin the second stage, the third and so on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from numbers import Real
from operator import getitem

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mpirun.model.split.errors import line_of_node, unknown_name
from mpirun.model.split.linear_partition import NEVER, balanced_starts
from mpirun.model.split.node_dependencies import Dependencies, is_buffer, value_bytes
from schedgen.util.errors import UsageError

PIPE_SPLIT = "pippy._pipe_split.default"  # the target of torch.distributed.pipelining.pipe_split() in a graph
SLACK = 0.1  # the fraction by which the slowest stage may be slower so that less is sent


def starts_at_pipe_splits(dependencies: Dependencies) -> list[fx.Node]:
    """The first nodes after each pipe_split() in the model's source."""
    starts: list[fx.Node] = []
    for mark in dependencies.graph.nodes:
        if str(mark.target) == PIPE_SPLIT:
            position = dependencies.position
            behind = [node for node in dependencies.body if position[node] > position[mark]]
            if not behind:
                raise UsageError(f"{line_of_node(mark)}: the stage that begins here would have no computation")
            if behind[0] is dependencies.body[0] or behind[0] in starts:
                raise _empty_stage(line_of_node(mark))
            starts.append(behind[0])
    return starts


def starts_at_modules(dependencies: Dependencies, module: nn.Module, points: Collection[str]) -> list[fx.Node]:
    """The first nodes of the submodules of these names."""
    names = dict(module.named_modules(remove_duplicate=False))
    starts: dict[fx.Node, str] = {}
    for point in points:
        if point not in names or not point:
            raise unknown_name("points: the submodule", point, names)
        inside = [node for node in dependencies.body if point in module_names(node)]
        if not inside:
            raise UsageError(f"points: {point!r} computes nothing when the example runs")
        calls = {key for node in inside for key, (path, *_) in module_calls(node).items() if path == point}
        if len(calls) > 1:
            where = line_of_node(inside[0])
            raise UsageError(f"points: {point!r} runs {len(calls)} times ({where}), so it does not say where to cut")
        if inside[0] in starts:
            raise UsageError(f"points: {starts[inside[0]]!r} and {point!r} begin at the same place")
        if inside[0] is dependencies.body[0]:
            raise _empty_stage(f"points: {point!r}")
        starts[inside[0]] = point
    return list(starts)


def balanced_stages(
    dependencies: Dependencies, module: nn.Module, stages: int, costs: Mapping[str, float] | None
) -> list[fx.Node]:
    """The first nodes of stages that take equally long and send little; `costs`: of submodules, as for `split`."""
    if stages < 1:
        raise UsageError(f"{stages} stages: there should be one at least")
    prices = _prices(dependencies)
    starts = None
    if stages <= len(prices):
        starts = balanced_starts(_node_costs(dependencies, module, costs), stages, prices, SLACK)
    if starts is None:
        most = 1 + sum(price < NEVER for price in prices[1:])
        into = f"{most} stage{'s' * (most > 1)}"
        raise UsageError(
            f"the traced graph can be cut into {into} at most, not {stages}{_longest_uncut_range(dependencies)}"
        )
    return [dependencies.body[start] for start in starts[1:]]


def module_calls(node: fx.Node) -> Mapping[str, tuple[str, object]]:
    """The calls of modules that a node is in: by call, the module's name and class."""
    return node.meta.get("nn_module_stack") or {}


def module_names(node: fx.Node) -> list[str]:
    """The names of the submodules that a node is in, the outermost first."""
    return [path for path, *_ in module_calls(node).values() if path]


def uncut_ranges(dependencies: Dependencies) -> list[tuple[fx.Node, int, int]]:
    """Roots of memory changed in place, each with the first and last index in the body that no cut may separate."""
    root, index = dependencies.root, _indices(dependencies)
    ranges = []
    for memory, writes in dependencies.writes.items():
        if is_buffer(memory):
            inside = [
                k for node, k in index.items() if any(root(operand) is memory for operand in node.all_input_nodes)
            ]
        else:
            last = max((index.get(write, -1) for write in writes), default=-1)
            inside = [k for node, k in index.items() if (root(node) is memory or node in writes) and k <= last]
        if inside:
            ranges.append((memory, min(inside), max(inside)))
    return ranges


def _indices(dependencies: Dependencies) -> dict[fx.Node, int]:
    return {node: k for k, node in enumerate(dependencies.body)}


def _last_uses(dependencies: Dependencies) -> list[int]:
    """By node of the body, the index in the body of the last node that uses it; the body's length if an output does."""
    index, last_uses = _indices(dependencies), []
    for node, begin in index.items():
        uses = [index[user] for user in node.users if user in index]
        uses += [len(index)] * any(user.op == "output" for user in node.users)
        last_uses.append(max(uses, default=begin))
    return last_uses


def _complex_ranges(dependencies: Dependencies) -> list[tuple[fx.Node, int, int]]:
    """Nodes that make complex numbers, which cannot be sent, each with its index in the body and its last use's."""
    return [
        (node, k, min(last_use, len(dependencies.body) - 1))
        for k, (node, last_use) in enumerate(zip(dependencies.body, _last_uses(dependencies), strict=True))
        if any(isinstance(x, Tensor) and x.is_complex() for x in tree_leaves(node.meta.get("val")))
    ]


def _longest_uncut_range(dependencies: Dependencies) -> str:
    """The longest run of operations that is not cut, and why, as the end of a sentence."""
    in_place, kept_whole = uncut_ranges(dependencies), _complex_ranges(dependencies)
    root, first, last = max([*in_place, *kept_whole], key=lambda entry: entry[2] - entry[1], default=(None, 0, 0))
    if root is None or last == first:
        return ""
    if (root, first, last) in in_place:
        what = f"the buffer {root.target}" if is_buffer(root) else "a tensor"
        why = f"{what} is changed in place at {line_of_node(dependencies.writes[root][0])}"
    else:
        why = f"complex numbers cannot be sent, such as those made at {line_of_node(root)}"
    return f": {last - first + 1} operations stay together, since {why}"


def _empty_stage(what: str) -> UsageError:
    return UsageError(f"{what}: the stage that ends here would have no computation")


def _prices(dependencies: Dependencies) -> list[float]:
    """By node of the body, the price of a cut before it: bytes sent there, plus the number of modules cut.

    Nothing is cut where no value is alive, as after a counter at the head: nobody would read the stage before.
    """
    body, last_uses = dependencies.body, _last_uses(dependencies)
    changes = [0] * (len(body) + 1)  # of the bytes that are alive
    for k, (node, last_use) in enumerate(zip(body, last_uses, strict=True)):
        changes[k + 1] += value_bytes(node)
        changes[min(last_use + 1, len(body))] -= value_bytes(node)
    prices, alive = [0.0], 0
    for k, (before, node) in enumerate(pairwise(body), 1):
        alive += changes[k]
        prices.append(float(alive + len(module_calls(before).keys() & module_calls(node).keys())))
    for k, last_use in enumerate(accumulate(last_uses, max), 1):
        if k < len(body) and last_use < k:
            prices[k] = NEVER
    for k, node in enumerate(body):
        if node.target is getitem:  # stays with the node whose result it is a part of
            prices[k] = NEVER
    for _, first, last in (*uncut_ranges(dependencies), *_complex_ranges(dependencies)):
        prices[first + 1 : last + 1] = [NEVER] * (last - first)
    return prices


def _node_costs(dependencies: Dependencies, module: nn.Module, costs: Mapping[str, float] | None) -> list[float]:
    """By node of the body, its flops plus the bytes of its parameters; if `costs` are given, scaled to them.

    The cost of a submodule is that of its nodes, without those of submodules in it that have costs of their own.
    """
    parameters, body = dependencies.exported.parameters, dependencies.body
    own = []
    for node in body:
        read = [str(operand.target) for operand in node.all_input_nodes if str(operand.target) in parameters]
        own.append(float(dependencies.flops.get(node, 0) + sum(parameters[name].nbytes for name in read)))
    if costs is None:
        return own
    names = dict(module.named_modules())
    inside: dict[str, list[int]] = {name: [] for name in costs}
    for name, cost in costs.items():
        if name not in names:
            raise unknown_name("costs: the submodule", name, names)
        if not isinstance(cost, Real) or not 0 <= cost < math.inf:
            raise UsageError(f"costs: the cost of {name!r} should be a number that is not negative, not {cost!r}")
    for k, node in enumerate(body):
        priced = [name for name in module_names(node) if name in costs]
        if priced:
            inside[priced[-1]].append(k)
    scaled = [0.0] * len(own)
    for name, indices in inside.items():
        if not indices:
            raise UsageError(f"costs: {name!r} computes nothing when the example runs")
        total = sum(own[k] for k in indices)
        for k in indices:
            scaled[k] = costs[name] * (own[k] / total if total else 1 / len(indices))
    return scaled
