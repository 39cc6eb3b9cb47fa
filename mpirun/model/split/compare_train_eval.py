"""What differs between train and eval mode, found by comparing the graphs that a module is traced to in both.

`compare_with_eval` finds the operations that eval mode leaves out; `follow_eval` makes stages leave them out, too. Any
difference but these and the operations of `train_eval_ops` is refused: stages cannot follow it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from mpirun.model.split.errors import line_of_node
from mpirun.model.split.export_graph import ExportedGraph
from mpirun.model.split.node_dependencies import (
    arguments_of,
    views_of,
    written_arguments,
    written_roots,
)
from mpirun.model.split.subgraphs import same_values, subgraphs
from mpirun.model.split.train_eval_ops import (
    MODE_OPS,
    TRACED,
    Choice,
    changes_counter,
    counters_of,
    eval_arguments,
)
from schedgen.util.errors import UsageError

aten = torch.ops.aten
DROPOUTS = (  # in eval mode they return their first argument
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)


class LeftOut(NamedTuple):
    """What eval mode leaves out, by names of nodes of the graph of train mode."""

    nodes: frozenset[str] = frozenset()  # in eval mode their values are used by one another only
    twins: Mapping[str, str] = {}  # by such a node, the node whose value its users take in eval mode


def compare_with_eval(train: ExportedGraph, evaluated: ExportedGraph) -> LeftOut:
    """What eval mode leaves out; UsageError, with the line, if the graphs of both modes differ in anything else."""
    node_of = dict(zip(evaluated.inputs, train.inputs, strict=True)) | _attributes_of(train, evaluated)
    comparison = _Comparison(train.state, evaluated.state, counters_of(train.graph), node_of)
    comparison.compare(train.graph, evaluated.graph)
    if train.spec != evaluated.spec:
        raise _differs(train.graph.output_node())
    twins = {node.name: twin.name for node, twin in comparison.dropped.items() if node in comparison.left_out}
    return LeftOut(frozenset(node.name for node in comparison.left_out), twins)


def _attributes_of(train: ExportedGraph, evaluated: ExportedGraph) -> dict[fx.Node, fx.Node]:
    """By node of a parameter or buffer in the graph of eval mode, its node in that of train mode.

    Buffers that eval mode changes, too, are left out: their node in train mode may be used after the change.
    """
    changed = written_roots(evaluated.graph, evaluated.state)
    nodes = {id(train.state[str(node.target)]): node for node in train.graph.find_nodes(op="get_attr")}
    twins = {twin: id(evaluated.state[str(twin.target)]) for twin in evaluated.graph.find_nodes(op="get_attr")}
    return {twin: nodes[key] for twin, key in twins.items() if key in nodes and twin not in changed}


def follow_eval(stage: nn.Module, left_out: LeftOut) -> None:
    """Make a traced stage leave out in eval mode what the module leaves out.

    UsageError if eval mode replaces a value of the stage by a value of another stage.
    """
    if not isinstance(stage, fx.GraphModule):
        return
    order = {node: place for place, node in enumerate(stage.graph.nodes)}
    traced = {node.meta[TRACED]: node for node in order if TRACED in node.meta}
    for name, twin in left_out.twins.items():
        node = traced.get(name)
        if node is None or node.op == "placeholder" or hasattr(stage, f"{MODE_OPS}{name}"):
            continue  # in another stage, which sends the mode's value; or done already
        users = {user for user in node.users if user.meta.get(TRACED) not in left_out.nodes}
        if users and twin not in traced:
            raise _differs(node)
        if users:
            args = node, traced[twin]
            stage.add_module(f"{MODE_OPS}{name}", Choice().train(stage.training))
            with stage.graph.inserting_after(max(args, key=order.__getitem__)):
                call = stage.graph.call_module(f"{MODE_OPS}{name}", args)
            node.replace_all_uses_with(call, users.__contains__)
    stage.recompile()


class _Comparison:
    """Compares the graphs of both modes, node by node."""

    def __init__(
        self,
        state: Mapping[str, Any],
        eval_state: Mapping[str, Any],
        counters: Collection[fx.Node],
        node_of: dict[fx.Node, fx.Node],
    ) -> None:
        """`counters`: nodes of train mode's graph; `node_of`: its node by input or attribute of eval mode's graph."""
        self.state, self.eval_state, self.counters, self.node_of = state, eval_state, counters, node_of
        self.dropped: dict[fx.Node, fx.Node] = {}  # by node that eval mode lacks: what its users use there
        self.newly_dropped: dict[fx.Node, fx.Node] = {}  # the same, valid if the node being compared matches
        self.left_out: dict[fx.Node, None] = {}  # nodes that eval mode lacks, without dropouts
        self.views: dict[fx.Node, fx.Node] = {}  # by node, the one whose memory it shares

    def compare(self, graph: fx.Graph, other: fx.Graph, whole: bool = True) -> None:
        """UsageError unless `other`, the graph of eval mode, is `graph`, that of train mode, without some nodes.

        Each node of `other` must match one of `graph`: the same operation on matching arguments. `whole`: False for
        subgraphs, which may leave nothing out.
        """
        self.views = views_of(graph, self.state)
        nodes = [node for node in graph.nodes if _computes(node) and not changes_counter(node, self.counters)]
        twins = [node for node in other.nodes if _computes(node)][::-1]
        for node in nodes:  # each graph ends with its only output
            twin = twins[-1]
            self.newly_dropped.clear()
            if node.target in DROPOUTS and twin.target is not node.target:  # as in nn.MultiheadAttention
                self.dropped[node] = self._uncopied(node.args[0])
            elif self._match_call(node, twin):
                self.node_of[twins.pop()] = node
                self.dropped |= self.newly_dropped
            else:
                self.newly_dropped.clear()
                if not whole or not self._leave_out(node):
                    raise _differs(next(iter(self.left_out), node))

    def _leave_out(self, node: fx.Node) -> bool:
        """Whether eval mode may leave out a node: it writes to left-out values alone. If so, record it."""
        written = [] if eval_arguments(node) else written_arguments(node, self.state)  # eval mode changes no statistics
        if node.op == "output" or not all(self.views.get(x, x) in self.left_out for x in written):
            return False
        self.left_out[node] = None
        return True

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
                inner.compare(one.code.graph, other.code.graph, False)
            except UsageError:
                return False
        constants = ([x for x in n.args if not isinstance(x, fx.Node)] for n in (node, twin))
        return self._match(*constants)

    def _match(self, value: Any, other: Any) -> bool:
        """Whether arguments are the same in both graphs, or those of eval mode replace left-out ones."""
        if isinstance(value, fx.Node) and isinstance(other, fx.Node):
            value, other = self._uncopied(value), self._uncopied(other)
            if value.op == other.op == "get_attr":
                return same_values(self.state[str(value.target)], self.eval_state[str(other.target)])
            twin = self.node_of.get(other)
            if value in self.left_out and twin and self._kind(value) == self._kind(twin):
                self.newly_dropped[value] = twin
                return True
            return twin is value
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            return value.keys() == other.keys() and all(self._match(value[key], other[key]) for key in value)
        if isinstance(value, list | tuple) and isinstance(other, list | tuple):
            return len(value) == len(other) and all(map(self._match, value, other))
        return bool(value == other)

    def _kind(self, node: fx.Node) -> object:
        """The shape and type of a value, on which nodes that are left out are still computed in eval mode."""
        value = node.meta.get("val", self.state.get(str(node.target)))
        return (value.shape, value.dtype) if isinstance(value, Tensor) else None

    def _uncopied(self, node: fx.Node) -> fx.Node:
        """The node that was made contiguous, or its replacement: attention may use other layouts in eval mode."""
        while node.target is aten.contiguous.default:
            node = node.all_input_nodes[0]
        return self.newly_dropped.get(node) or self.dropped.get(node, node)


def _computes(node: fx.Node) -> bool:
    return node.op == "output" or (node.op == "call_function" and node.target is not aten.contiguous.default)


def _operation(node: fx.Node) -> tuple[str, object]:
    return node.op, aten.reshape.default if node.target is aten.view.default else node.target


def _differs(node: fx.Node) -> UsageError:
    return UsageError(
        f"{line_of_node(node)}: differs between train and eval mode by more than what eval mode leaves out: "
        "stages cannot follow"
    )
