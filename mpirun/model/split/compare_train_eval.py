"""What differs between train and eval mode, found by comparing the graphs that a module is traced to in both.

Stages follow the mode by the operations of `train_eval_ops`. Any other difference is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from mpirun.model.split.errors import line_of_node
from mpirun.model.split.export_graph import ExportedGraph
from mpirun.model.split.node_dependencies import (
    arguments_of,
    written_roots,
)
from mpirun.model.split.subgraphs import same_values, subgraphs
from mpirun.model.split.train_eval_ops import (
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
        """Whether arguments are the same in both graphs."""
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
