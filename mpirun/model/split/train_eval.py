"""Train and eval mode: operations of a traced stage that follow its `train()` and `eval()`, as in the module.

A graph is traced in one mode, whose decisions are constants in it: whether a dropout drops, whether BatchNorm uses the
batch's statistics. These follow the mode. `compare_with_eval` compares the graphs that a module is traced to in both
modes: any other difference is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from mpirun.model.split.errors import line_of_node
from mpirun.model.split.export_graph import ExportedGraph
from mpirun.model.split.node_dependencies import arguments_of, written_roots
from mpirun.model.split.subgraphs import same_values, subgraphs
from schedgen.util.errors import UsageError

aten = torch.ops.aten
MODE_OPS = "__modes__"  # the submodule that holds a stage's operations that follow the mode
EVAL_VALUES = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}  # by aten's parameter
COUNTER = "num_batches_tracked"  # the buffer that normalisations count in, in train mode only
DROPOUTS = (  # in eval mode they return their first argument
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)


class ModeOp(nn.Module):
    """An operation as it was traced; in eval mode some of its arguments have other values."""

    def __init__(self, operation: Callable[..., Any], in_eval: Mapping[int | str, Any]) -> None:
        """`in_eval`: by position or keyword of an argument, its value in eval mode."""
        super().__init__()
        self.operation, self.in_eval = operation, in_eval

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operation's result."""
        if not self.training:
            args = tuple(self.in_eval.get(position, argument) for position, argument in enumerate(args))
            kwargs |= {name: value for name, value in self.in_eval.items() if isinstance(name, str)}
        return self.operation(*args, **kwargs)


class CountOp(nn.Module):
    """A change in place of a counter, the first argument; in eval mode the counter stays as it is."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        """`operation`: the node's target."""
        super().__init__()
        self.operation = operation

    def forward(self, counter: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The counter."""
        return self.operation(counter, *args, **kwargs) if self.training else counter


def mode_op(node: fx.Node, counters: Collection[fx.Node]) -> nn.Module | None:
    """A module that runs a node as the mode asks; None if the mode changes nothing. `counters`: nodes of counters."""
    if changes_counter(node, counters):
        return CountOp(node.target)  # type: ignore[arg-type]
    in_eval = eval_arguments(node)
    return ModeOp(node.target, in_eval) if in_eval else None  # type: ignore[arg-type]


def counters_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of normalisations' counters."""
    return [node for node in graph.find_nodes(op="get_attr") if str(node.target).rpartition(".")[2] == COUNTER]


def follow_mode_inside(node: fx.Node, state: Mapping[str, Any], counters: Collection[fx.Node]) -> None:
    """Change the subgraphs that a node runs so that they follow the mode; `state`, `counters`: of the node's graph."""
    for inside in subgraphs(node, state):
        code = inside.code
        inner_counters = [inner for inner, operand in inside.operand_of.items() if operand in counters]
        for inner, operation in [(inner, mode_op(inner, inner_counters)) for inner in code.graph.nodes]:
            follow_mode_inside(inner, inside.state, inner_counters)
            if operation is not None:
                name = f"{MODE_OPS}{inner.name}"
                code.add_module(name, operation)
                with code.graph.inserting_before(inner):
                    call = code.graph.call_module(name, inner.args, inner.kwargs)
                inner.replace_all_uses_with(call)
                code.graph.erase_node(inner)
        code.recompile()


def keep_eval_mode(stages: Iterable[nn.Module]) -> None:
    """For a module traced in eval mode: what drops there, or uses batch statistics, does so in both modes."""
    for stage in stages:
        for part in stage.modules():
            if isinstance(part, ModeOp):
                part.in_eval = {}


def changes_counter(node: fx.Node, counters: Collection[fx.Node]) -> bool:
    """Whether a node changes a counter in place, which an earlier change may have returned."""
    changed: object = node
    while isinstance(changed, fx.Node) and isinstance(changed.target, OpOverload) and changed.args:
        alias = changed.target._schema.arguments[0].alias_info
        if alias is None or not alias.is_write:
            return False
        changed = changed.args[0]
    return changed is not node and changed in counters


def eval_arguments(node: fx.Node) -> dict[int | str, Any]:
    """The values in eval mode of the arguments that the mode changes, by position or keyword."""
    if not isinstance(node.target, OpOverload):
        return {}
    changed: dict[int | str, Any] = {}
    given = arguments_of(node)
    for position, parameter in enumerate(node.target._schema.arguments):
        value = EVAL_VALUES.get(parameter.name)
        keeps_statistics = given.get("running_mean", node) is not None  # without them, eval mode is like train mode
        if value is not None and given[parameter.name] != value and keeps_statistics:
            changed[position if position < len(node.args) else parameter.name] = value
    return changed


def compare_with_eval(train: ExportedGraph, evaluated: ExportedGraph) -> None:
    """UsageError, with the line, if the graphs of both modes differ in what stages cannot follow."""
    node_of = dict(zip(evaluated.inputs, train.inputs, strict=True)) | _attributes_of(train, evaluated)
    _Comparison(train.state, evaluated.state, counters_of(train.graph), node_of).compare(train.graph, evaluated.graph)
    if train.spec != evaluated.spec:
        raise _differs(train.graph.output_node())


def _attributes_of(train: ExportedGraph, evaluated: ExportedGraph) -> dict[fx.Node, fx.Node]:
    """By node of a parameter or buffer in the graph of eval mode, its node in that of train mode.

    Buffers that eval mode changes, too, are left out: their node in train mode may be used after the change.
    """
    changed = written_roots(evaluated.graph, evaluated.state)
    nodes = {id(train.state[str(node.target)]): node for node in train.graph.find_nodes(op="get_attr")}
    twins = {twin: id(evaluated.state[str(twin.target)]) for twin in evaluated.graph.find_nodes(op="get_attr")}
    return {twin: nodes[key] for twin, key in twins.items() if key in nodes and twin not in changed}


class _Comparison:
    def __init__(
        self,
        state: Mapping[str, Any],
        eval_state: Mapping[str, Any],
        counters: Collection[fx.Node],
        node_of: dict[fx.Node, fx.Node],
    ) -> None:
        """`counters`: nodes of train mode's graph; `node_of`: its node by input or attribute of eval mode's graph."""
        self.state, self.eval_state, self.counters, self.node_of = state, eval_state, counters, node_of
        self.dropped: dict[fx.Node, fx.Node] = {}  # by dropout that eval mode lacks: what its users use there

    def compare(self, graph: fx.Graph, evaluated: fx.Graph) -> None:
        """UsageError unless each node but counters and dropouts has a twin in `evaluated`, the graph of eval mode.

        A twin does the same operation on matching arguments.
        """
        twins = [node for node in evaluated.nodes if _computes(node)][::-1]
        for node in graph.nodes:  # each graph ends with its only output
            if not _computes(node) or changes_counter(node, self.counters):
                continue
            if node.target in DROPOUTS and twins[-1].target is not node.target:  # as in nn.MultiheadAttention
                self.dropped[node] = self._uncopied(node.args[0])
            elif self._match_call(node, twins[-1]):
                self.node_of[twins.pop()] = node
            else:
                raise _differs(node)

    def _match_call(self, node: fx.Node, twin: fx.Node) -> bool:
        if _operation(node) != _operation(twin):
            return False
        if [*subgraphs(node, self.state)]:
            return self._match_subgraphs(node, twin)
        if not isinstance(node.target, OpOverload):
            return self._match((node.args, node.kwargs), (twin.args, twin.kwargs))
        traced, in_eval = arguments_of(node), arguments_of(twin)
        names = [*traced]
        changes = {names[at] if isinstance(at, int) else at: value for at, value in eval_arguments(node).items()}
        if changes and all(in_eval[name] == traced[name] for name in changes):
            raise UsageError(
                f"{line_of_node(node)}: the same in eval mode as in train mode, but stages follow the mode: "
                "give it training=self.training"
            )
        return self._match(traced | changes, in_eval)

    def _match_subgraphs(self, node: fx.Node, twin: fx.Node) -> bool:
        """Whether the subgraphs that two nodes run do the same, with the same operands except for counters."""
        inside, others = list(subgraphs(node, self.state)), list(subgraphs(twin, self.eval_state))
        if len(inside) != len(others):
            return False
        for one, other in zip(inside, others, strict=True):
            kept = {inner: operand for inner, operand in one.operand_of.items() if operand not in self.counters}
            counters = [inner for inner in one.operand_of if inner not in kept]
            twins = other.code.graph.find_nodes(op="placeholder")
            if not self._match(list(kept.values()), other.operands) or len(twins) != len(kept):
                return False
            inner = _Comparison(one.state, other.state, counters, dict(zip(twins, kept, strict=True)))
            try:
                inner.compare(one.code.graph, other.code.graph)
            except UsageError:
                return False
        constants = ([x for x in n.args if not isinstance(x, fx.Node)] for n in (node, twin))
        return self._match(*constants)

    def _match(self, value: Any, other: Any) -> bool:
        if isinstance(value, fx.Node) and isinstance(other, fx.Node):
            value, other = self._uncopied(value), self._uncopied(other)
            if value.op == other.op == "get_attr":
                return same_values(self.state[str(value.target)], self.eval_state[str(other.target)])
            return self.node_of.get(other) is value
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            return value.keys() == other.keys() and all(self._match(value[key], other[key]) for key in value)
        if isinstance(value, list | tuple) and isinstance(other, list | tuple):
            return len(value) == len(other) and all(map(self._match, value, other))
        return bool(value == other)

    def _uncopied(self, node: fx.Node) -> fx.Node:
        """The node that was made contiguous, or its replacement: attention may use other layouts in eval mode."""
        while node.target is aten.contiguous.default:
            node = node.all_input_nodes[0]
        return self.dropped.get(node, node)


def _computes(node: fx.Node) -> bool:
    return node.op == "output" or (node.op == "call_function" and node.target is not aten.contiguous.default)


def _operation(node: fx.Node) -> tuple[str, object]:
    return node.op, aten.reshape.default if node.target is aten.view.default else node.target


def _differs(node: fx.Node) -> UsageError:
    return UsageError(
        f"{line_of_node(node)}: differs between train and eval mode by more than dropouts and normalisations: "
        "stages cannot follow"
    )
