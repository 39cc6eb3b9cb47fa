"""Where a graph is cut: at pipe_split(), where submodules begin, or so that stages are balanced and send little.

Out: the nodes of the body that begin the second stage, the third and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import getitem

import numpy as np
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mpirun.model.split.errors import line_of_node, unknown_name
from mpirun.model.split.node_dependencies import Dependencies, is_buffer, value_bytes
from schedgen.util.errors import UsageError

PIPE_SPLIT = "pippy._pipe_split.default"  # the target of torch.distributed.pipelining.pipe_split() in a graph
SLACK = 0.1  # the fraction by which the slowest stage may be slower so that less is sent

NEVER = float("inf")  # the price of a place where no run may begin


def even_starts(count: int, runs: int) -> list[int]:
    """Where each of `runs` runs of `count` items begins; the first ones are longer if needed."""
    shorter, longer = divmod(count, runs)
    return [shorter * k + min(k, longer) for k in range(runs)]


def balanced_starts(costs: Sequence[float], runs: int, prices: Sequence[float], slack: float) -> list[int] | None:
    """Where each of `runs` runs of items with these costs begins, so that the largest sum is least; None: impossible.

    `prices`, whole numbers, by item: what it costs to begin a run there, or NEVER. Of all divisions whose largest sum
    is within a fraction `slack` of the least, it is the one of least total price, and then of least sum of squares.
    """
    count = len(costs)
    ends = np.concatenate([[0.0], np.cumsum(costs if any(costs) else np.ones(count))])
    price = np.asarray(prices, float)
    closed = np.where(np.isinf(price), NEVER, 0.0)
    least = np.full(count + 1, NEVER)  # by number of items, the least largest sum of the runs so far
    least[0] = 0.0
    for _ in range(runs):
        least = np.array(
            [NEVER, *(np.maximum(least[:j] + closed[:j], ends[j] - ends[:j]).min() for j in range(1, count + 1))]
        )
    if not np.isfinite(least[-1]):
        return None
    limit = least[-1] * (1 + slack + 1e-12)
    paid = np.full(count + 1, NEVER)
    paid[0] = 0.0
    choices: list[list[int]] = []  # by run, then number of items: where the last run begins
    for _ in range(runs):
        before, paid, chosen = paid, np.full(count + 1, NEVER), [0] * (count + 1)
        for j in range(1, count + 1):
            sums = ends[j] - ends[:j]
            totals = np.where(sums > limit, NEVER, before[:j] + price[:j] + 0.5 * (sums / ends[-1]) ** 2)
            chosen[j] = int(totals.argmin())
            paid[j] = totals[chosen[j]]
        choices.append(chosen)
    starts, end = [], count
    for chosen in reversed(choices):
        end = chosen[end]
        starts.append(end)
    return starts[::-1]


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


def balanced_stages(dependencies: Dependencies, stages: int) -> list[fx.Node]:
    """The first nodes of stages that take equally long and send little."""
    if stages < 1:
        raise UsageError(f"{stages} stages: there should be one at least")
    prices = _prices(dependencies)
    starts = None
    if stages <= len(prices):
        starts = balanced_starts(_node_costs(dependencies), stages, prices, SLACK)
    if starts is None:
        most = 1 + sum(price < NEVER for price in prices[1:])
        raise UsageError(f"the traced graph can be cut into {most} stages at most, not {stages}")
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


def check_changes_in_place(dependencies: Dependencies, starts: Collection[fx.Node]) -> None:
    """UsageError if stages that begin at these nodes would change in place what an earlier stage or the input has."""
    for root, writes in dependencies.writes.items():
        if root.op == "placeholder":
            raise UsageError(f"{line_of_node(writes[0])}: changes the input in place, which other stages read, too")
    for root, first, last in uncut_ranges(dependencies):
        if not {*starts}.isdisjoint(dependencies.body[first + 1 : last + 1]):
            what = f"the buffer {root.target}" if is_buffer(root) else "a tensor"
            where = line_of_node(dependencies.writes[root][0])
            raise UsageError(f"{where}: changes {what} in place, which several stages would use; cut elsewhere")


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


def _empty_stage(what: str) -> UsageError:
    return UsageError(f"{what}: the stage that ends here would have no computation")


def _prices(dependencies: Dependencies) -> list[float]:
    """By node of the body, the price of a cut before it: bytes sent there, plus the number of modules cut.

    Nothing is cut where no value is alive, as after a counter at the head: nobody would read the stage before.
    """
    body, last_uses = dependencies.body, _last_uses(dependencies)
    uncut = [(first, last) for _, first, last in uncut_ranges(dependencies)]
    for k, node in enumerate(body):
        if any(isinstance(x, Tensor) and x.is_complex() for x in tree_leaves(node.meta.get("val"))):
            uncut.append((k, min(last_uses[k], len(body) - 1)))
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
    for first, last in uncut:
        prices[first + 1 : last + 1] = [NEVER] * (last - first)
    return prices


def _node_costs(dependencies: Dependencies) -> list[float]:
    parameters, costs = dependencies.exported.parameters, []
    for node in dependencies.body:
        read = [str(operand.target) for operand in node.all_input_nodes if str(operand.target) in parameters]
        costs.append(float(dependencies.flops.get(node, 0) + sum(parameters[name].nbytes for name in read)))
    return costs
