"""Where a traced graph is cut: the nodes that begin the second stage, the third and so on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from operator import getitem

from torch import fx, nn

from mpirun.frontend.balance import NEVER, balanced
from mpirun.frontend.errors import place, unknown
from mpirun.frontend.node_dependencies import Flow, persistent, size
from schedgen.util.errors import UsageError

MARK = "pippy._pipe_split.default"  # what torch.distributed.pipelining.pipe_split() is in a graph
SLACK = 0.1  # how much slower the slowest stage may be so that less is sent


def marked(flow: Flow) -> list[fx.Node]:
    """Where the model's source calls pipe_split."""
    found = []
    for mark in flow.graph.nodes:
        if str(mark.target) == MARK:
            behind = [node for node in flow.body if flow.position[node] > flow.position[mark]]
            if not behind:
                raise UsageError(f"{place(mark)}: the stage that begins here would have no computation")
            found.append(behind[0])
            _computes(flow, found, place(mark))
    return found


def named(flow: Flow, module: nn.Module, points: Collection[str]) -> list[fx.Node]:
    """Where the submodules of these names begin."""
    names = dict(module.named_modules(remove_duplicate=False))
    found: dict[fx.Node, str] = {}
    for point in points:
        if point not in names or not point:
            raise unknown("points: the submodule", point, names)
        inside = [node for node in flow.body if point in modules(node)]
        if not inside:
            raise UsageError(f"points: {point!r} computes nothing when the example runs")
        calls = {key for node in inside for key, (path, *_) in stack(node).items() if path == point}
        if len(calls) > 1:
            where = place(inside[0])
            raise UsageError(f"points: {point!r} runs {len(calls)} times ({where}), so it does not say where to cut")
        if inside[0] in found:
            raise UsageError(f"points: {found[inside[0]]!r} and {point!r} begin at the same place")
        found[inside[0]] = point
        _computes(flow, [inside[0]], f"points: {point!r}")
    return list(found)


def automatic(flow: Flow, module: nn.Module, stages: int, costs: Mapping[str, float] | None) -> list[fx.Node]:
    """Where stages are balanced and little is sent."""
    if stages < 1:
        raise UsageError(f"{stages} stages: there should be one at least")
    tolls = _tolls(flow)
    begins = balanced(_costs(flow, module, costs), stages, tolls, SLACK) if stages <= len(tolls) else None
    if begins is None:
        most = 1 + sum(toll < NEVER for toll in tolls[1:])
        into = f"{most} stage{'s' * (most > 1)}"
        raise UsageError(f"the traced graph can be cut into {into} at most, not {stages}{_whole(flow)}")
    return [flow.body[begin] for begin in begins[1:]]


def stack(node: fx.Node) -> Mapping[str, tuple[str, object]]:
    """The calls of modules that a node is in: by call the module's name and class."""
    return node.meta.get("nn_module_stack") or {}


def modules(node: fx.Node) -> list[str]:
    """The names of the modules that it is in, the outermost first, without the whole."""
    return [path for path, *_ in stack(node).values() if path]


def changed(flow: Flow) -> list[tuple[fx.Node, int, int]]:
    """Memory that is changed in place, and the first and the last place in the body between which it may not be cut."""
    index = {node: k for k, node in enumerate(flow.body)}
    found = []
    for root, writes in flow.writes.items():
        if persistent(root):
            inside = [k for node, k in index.items() if any(flow.root(one) is root for one in node.all_input_nodes)]
        else:
            inside = [k for node, k in index.items() if flow.root(node) is root and k <= index.get(writes[-1], -1)]
        if inside:
            found.append((root, min(inside), max(inside)))
    return found


def _whole(flow: Flow) -> str:
    """The longest run of operations that is not cut, and why."""
    root, first, last = max(changed(flow), key=lambda one: one[2] - one[1], default=(None, 0, 0))
    if root is None or last == first:
        return ""
    what = f"the buffer {root.target}" if persistent(root) else "a tensor"
    where = place(flow.writes[root][0])
    return f": {last - first + 1} operations stay together, since {what} is changed in place at {where}"


def _computes(flow: Flow, found: Sequence[fx.Node], what: str) -> None:
    if found[-1] is flow.body[0] or found[-1] in found[:-1]:
        raise UsageError(f"{what}: the stage that ends here would have no computation")


def _tolls(flow: Flow) -> list[float]:
    """Bytes that a border in front of each node of the body sends, and how many modules it cuts through."""
    index = {node: k for k, node in enumerate(flow.body)}
    changes = [0] * (len(flow.body) + 1)
    for node, begin in index.items():
        uses = [index[user] for user in node.users if user in index] + [len(index)] * any(
            user.op == "output" for user in node.users
        )
        changes[begin + 1] += size(node)
        changes[min(max(uses, default=begin) + 1, len(index))] -= size(node)
    tolls, total = [0.0], 0
    for k, (one, other) in enumerate(pairwise(flow.body), 1):
        total += changes[k]
        tolls.append(float(total + len(stack(one).keys() & stack(other).keys())))
    for k, node in enumerate(flow.body):
        if node.target is getitem:  # goes with what it is part of
            tolls[k] = NEVER
    for _, first, last in changed(flow):
        tolls[first + 1 : last + 1] = [NEVER] * (last - first)
    return tolls


def _costs(flow: Flow, module: nn.Module, costs: Mapping[str, float] | None) -> list[float]:
    """Of each node of the body: flops and bytes of parameters, scaled to the costs of modules that are known."""
    parameters = flow.traced.parameters
    own = [
        float(
            flow.flops.get(node, 0)
            + sum(parameters[str(one.target)].nbytes for one in node.all_input_nodes if str(one.target) in parameters)
        )
        for node in flow.body
    ]
    if costs is None:
        return own
    names = dict(module.named_modules())
    inside: dict[str, list[int]] = {name: [] for name in costs}
    for name, cost in costs.items():
        if name not in names:
            raise unknown("costs: the submodule", name, names)
        if not isinstance(cost, Real) or not 0 <= cost < math.inf:
            raise UsageError(f"costs: that of {name!r} should be a number that is not negative, not {cost!r}")
    for k, node in enumerate(flow.body):
        known = [name for name in modules(node) if name in costs]
        if known:
            inside[known[-1]].append(k)
    scaled = [0.0] * len(own)
    for name, nodes in inside.items():
        if not nodes:
            raise UsageError(f"costs: {name!r} computes nothing when the example runs")
        total = sum(own[k] for k in nodes)
        for k in nodes:
            scaled[k] = costs[name] * (own[k] / total if total else 1 / len(nodes))
    return scaled
