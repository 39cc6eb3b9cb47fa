"""Changes in place, and cuts between a value and its change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from mpirun.frontend.cut_points import changed
from mpirun.frontend.errors import place
from mpirun.frontend.node_dependencies import Flow, persistent
from schedgen.util.errors import UsageError

aten = torch.ops.aten


def settle(flow: Flow) -> Flow:
    """A buffer gets its new value as soon as it may, not at the end of the graph, where torch.export assigns it."""
    settled = False
    for root in filter(persistent, flow.writes):
        for write in flow.writes[root]:
            value = write.args[1] if write.target is aten.copy_.default and write.args[0] is root else None
            if not isinstance(value, fx.Node) or value.op != "call_function":
                continue
            if _changes(value, root):  # it is there already
                write.replace_all_uses_with(root)
                flow.graph.erase_node(write)
            else:
                _last_use(flow, (root, flow.root(value)), value, write).append(write)
            settled = True
    return Flow(flow.traced, flow.flops) if settled else flow


def separate_inputs(flow: Flow) -> Flow:
    """Where the input is changed in place, a copy is changed: other stages read the input, too."""
    roots = [root for root in flow.writes if root.op == "placeholder"]
    for root in roots:
        _separate(flow, root, "changes the input in place, which other stages read")
    return Flow(flow.traced, flow.flops) if roots else flow


def separate(flow: Flow, starts: Sequence[fx.Node]) -> tuple[Flow, list[fx.Node]]:
    """Where a stage would change what an earlier one made, it changes a copy, which is what later ones read."""
    renewed, anew = list(starts), False
    for root, first, last in changed(flow):
        if not any(start in flow.body[first + 1 : last + 1] for start in renewed):
            continue
        if persistent(root):
            where = place(flow.writes[root][0])
            raise UsageError(
                f"{where}: changes the buffer {root.target}, which several stages would use; cut elsewhere"
            )
        copies = _separate(flow, root, "changes in place what an earlier stage has made")
        anew = True
        renewed = [copies.get(start, start) for start in renewed]
    return Flow(flow.traced, flow.flops) if anew else flow, renewed


def _changes(node: object, root: fx.Node) -> bool:
    """Whether its value is all of root, changed in place."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
        returned = [one.alias_info for one in node.target._schema.returns]
        if len(returned) != 1 or returned[0] is None or not returned[0].is_write:
            return False
        node = node.args[0]
    return node is root


def _last_use(flow: Flow, roots: Sequence[fx.Node], after: fx.Node, before: fx.Node) -> fx.Node:
    """The last node between two that reads or writes such memory; else the first of the two."""
    found, node = after, after.next
    while node is not before:  # by the graph as it is now, not by flow.position: others were moved
        if any(flow.root(one) in roots for one in node.all_input_nodes):
            found = node
        node = node.next
    return found


def _separate(flow: Flow, root: fx.Node, why: str) -> dict[fx.Node, fx.Node]:
    """By write the copy that it now changes."""
    writes = flow.writes[root]
    same = [root, *(node for node, one in flow.roots.items() if one is root)]
    if any(node not in writes for node in same[1:]):
        raise UsageError(
            f"{place(writes[0])}: {why}, and there are views of it; write it out of place, or cut elsewhere"
        )
    copies = {}
    for write in writes:
        given = next(node for node in write.all_input_nodes if node in same)
        with flow.graph.inserting_before(write):
            copies[write] = flow.graph.call_function(torch.ops.aten.clone.default, (given,))
        copies[write].meta = dict(given.meta) | {"nn_module_stack": write.meta.get("nn_module_stack", {})}
        write.replace_input_with(given, copies[write])
        for node in flow.graph.nodes:
            if flow.position.get(node, -1) > flow.position[write] or node.op == "output":
                for one in same:
                    if one is not write and flow.position[one] < flow.position[write]:
                        node.replace_input_with(one, write)
    return copies
