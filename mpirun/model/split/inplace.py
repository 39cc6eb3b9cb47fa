"""Changes in place: when they are done, and copies if a cut lies between a value and its change.

Each public function changes the graph, and returns its new `Dependencies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from mpirun.model.split.cut_points import uncut_ranges
from mpirun.model.split.errors import line_of_node
from mpirun.model.split.node_dependencies import Dependencies, is_buffer, written_arguments
from mpirun.model.split.subgraphs import result_inside
from schedgen.util.errors import UsageError

aten = torch.ops.aten


def copy_changed_inputs(dependencies: Dependencies) -> Dependencies:
    """Make operations that change the input in place change a copy: other stages read the input, too."""
    roots = [root for root in dependencies.writes if root.op == "placeholder"]
    for root in roots:
        _change_copies(dependencies, root, "changes the input in place, which other stages read")
    return Dependencies(dependencies.exported, dependencies.flops) if roots else dependencies


def copy_at_cuts(dependencies: Dependencies, starts: Sequence[fx.Node]) -> tuple[Dependencies, list[fx.Node]]:
    """Where a stage would change a value of an earlier stage in place, make it change a copy, which later stages read.

    `starts`: the first nodes of the second stage, the third and so on; the new ones are returned, too. UsageError if
    several stages would use a buffer that is changed, or a changed value has views.
    """
    new_starts, changed = list(starts), False
    for root, first, last in uncut_ranges(dependencies):
        if not any(start in dependencies.body[first + 1 : last + 1] for start in new_starts):
            continue
        if is_buffer(root):
            where = line_of_node(dependencies.writes[root][0])
            raise UsageError(
                f"{where}: changes the buffer {root.target}, which several stages would use; cut elsewhere"
            )
        copies = _change_copies(dependencies, root, "changes in place what an earlier stage has made")
        changed = True
        new_starts = [copies.get(start, start) for start in new_starts]
    return Dependencies(dependencies.exported, dependencies.flops) if changed else dependencies, new_starts


def _is_changed_in_place(node: object, root: fx.Node, state: Mapping[str, Any]) -> bool:
    """Whether a node's value is the whole of `root`, changed in place; `state`: what get_attr nodes refer to."""
    while isinstance(node, fx.Node) and node is not root:
        if (inside := result_inside(node, state)) is not None:
            result, operand_of, code_state = inside
            changed = [inner for inner in operand_of if _is_changed_in_place(result, inner, code_state)]
            node = operand_of[changed[0]] if changed else None
        elif isinstance(node.target, OpOverload):
            returned = [result.alias_info for result in node.target._schema.returns]
            whole = len(returned) == 1 and returned[0] and returned[0].is_write
            node = written_arguments(node, state)[0] if whole else None
        else:
            return False
    return node is root


def _change_copies(dependencies: Dependencies, root: fx.Node, why: str) -> dict[fx.Node, fx.Node]:
    """Make each write to the memory of `root` change a copy; returns the copies by write."""
    writes, position, exported = dependencies.writes[root], dependencies.position, dependencies.exported
    aliases = [root, *(node for node, viewed in dependencies.views.items() if viewed is root)]
    if not all(_is_changed_in_place(node, root, exported.state) for node in aliases):
        raise UsageError(
            f"{line_of_node(writes[0])}: {why}, and there are views of it; write it out of place, or cut elsewhere"
        )
    copies = {}
    for write in writes:
        operand = next(node for node in write.all_input_nodes if node in aliases)
        with dependencies.graph.inserting_before(write):
            copies[write] = dependencies.graph.call_function(aten.clone.default, (operand,))
        copies[write].meta = dict(operand.meta) | {"nn_module_stack": write.meta.get("nn_module_stack", {})}
        write.replace_input_with(operand, copies[write])
        earlier = [node for node in aliases if position.get(node, -1) < position[write]]
        for node in dependencies.graph.nodes:
            if position.get(node, -1) > position[write] or node.op == "output":
                for alias in earlier:
                    node.replace_input_with(alias, copies[write])
        aliases.append(copies[write])
    return copies
