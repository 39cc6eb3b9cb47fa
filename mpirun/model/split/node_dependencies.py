"""What each node of an exported graph needs, and which nodes every stage computes for itself.

A node needs its operands, and the last write in place to their memory. It is *replicated* if it needs no parameters
and no random numbers and is cheap, such as a mask or positions: every stage that uses it computes it. The other nodes
are the *body* of the graph: each is computed once, in one stage, and sent to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from mpirun.model.split.errors import line_of_node
from mpirun.model.split.export_graph import ExportedGraph
from schedgen.util.errors import UsageError, raised

aten = torch.ops.aten
STATISTICS = {aten.batch_norm.default: (3, 4), aten.instance_norm.default: (3, 4)}  # written, though not in schemas
CHEAP = 16  # flops per byte of output that a replicated node may do


class Dependencies:
    """The dependencies of the nodes of an exported graph.

    position    by node, its index in the graph
    views       by node that shares memory with an earlier one, the node whose memory it is, its *root*
    writes      by root, the nodes that write to its memory in place, in order
    needs       by node, the nodes that it needs, its operands among them
    flops       by node that has any
    replicated  the nodes that every stage computes for itself
    alive       the nodes that outputs and buffers need
    body        the nodes that are computed once, in order
    """

    def __init__(self, exported: ExportedGraph) -> None:
        """`exported`: the graph, which stays as it is."""
        self.exported, self.graph = exported, exported.graph
        self.position = {node: index for index, node in enumerate(self.graph.nodes)}
        self.views: dict[fx.Node, fx.Node] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        self.needs: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            for argument in _viewed(node):
                self.views[node] = self.root(argument)
            written = [self.root(argument) for argument in _written(node)]
            last = [self.writes[root][-1] for root in map(self.root, node.all_input_nodes) if root in self.writes]
            self.needs[node] = list(dict.fromkeys([*node.all_input_nodes, *last]))
            for root in written:
                self.writes.setdefault(root, []).append(node)
        self.flops = _count_flops(exported)
        self.replicated = self._replicated()
        results = exported.output()[0]
        buffers = [node for root, nodes in self.writes.items() if is_buffer(root) for node in nodes]
        ends = [write for node in results for write in self.writes.get(self.root(node), [])]
        self.alive = self.closure([*results, *ends, *buffers], lambda node: True)
        body = self.alive - self.replicated
        self.body = [node for node in self.graph.nodes if node in body and node.op == "call_function"]

    def root(self, node: fx.Node) -> fx.Node:
        """The node whose memory a node shares; the node itself if it has its own."""
        return self.views.get(node, node)

    def closure(self, nodes: Iterable[fx.Node], inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """`nodes` and what they need, and so on for nodes that are `inside`."""
        reached = set(nodes)
        stack = list(reached)
        while stack:
            node = stack.pop()
            if inside(node):
                new = {need for need in self.needs[node] if need in node.all_input_nodes or inside(need)} - reached
                reached |= new
                stack += new
        return reached

    def ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes in the order of execution."""
        return sorted(nodes, key=self.position.__getitem__)

    def draws(self, node: fx.Node) -> bool:
        """Whether a node draws random numbers."""
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

    def _replicated(self) -> set[fx.Node]:
        """Cheap nodes that need only one another, and whose memory only they write to."""
        spoiled: set[fx.Node] = set()  # roots of memory that other nodes write to
        while True:
            replicated: set[fx.Node] = set()
            for node in self.graph.nodes:
                if self.root(node) not in spoiled and self._may_be_replicated(node, replicated):
                    replicated.add(node)
            written = {root for root, nodes in self.writes.items() if any(node not in replicated for node in nodes)}
            if written == spoiled:
                return replicated
            spoiled = written

    def _may_be_replicated(self, node: fx.Node, replicated: set[fx.Node]) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return node.target not in self.exported.parameters and node not in self.writes
        return (
            node.op == "call_function"
            and all(need in replicated for need in self.needs[node])
            and not self.draws(node)
            and self.flops.get(node, 0) <= CHEAP * value_bytes(node)
        )


def is_buffer(root: fx.Node) -> bool:
    """Whether writes to a root's memory outlive the forward."""
    return root.op == "get_attr"


def value_of(exported: ExportedGraph, node: fx.Node) -> Any:
    """A value, without data, that a node returned in the trace."""
    return node.meta["val"] if "val" in node.meta else exported.state[str(node.target)]


def value_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that a node returns."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of an aten operation by name, in their order."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    given = {parameter.name: value for parameter, value in zip(parameters, node.args, strict=False)}
    return defaults | given | dict(node.kwargs)


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments to whose memory a node writes."""
    written = []
    if isinstance(node.target, OpOverload):
        hidden = STATISTICS.get(node.target, ()) if len(node.args) > 5 and node.args[5] else ()
        for index, argument in enumerate(arguments_of(node).values()):
            parameter = node.target._schema.arguments[index]
            writes = parameter.alias_info is not None and parameter.alias_info.is_write
            if isinstance(argument, fx.Node) and (writes or index in hidden):
                written.append(argument)
    return written


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node may share."""
    if node.target is getitem:
        return [node.all_input_nodes[0]]
    if not isinstance(node.target, OpOverload) or all(r.alias_info is None for r in node.target._schema.returns):
        return []
    pairs = zip(node.target._schema.arguments, arguments_of(node).values(), strict=True)
    return [value for parameter, value in pairs if parameter.alias_info is not None and isinstance(value, fx.Node)]


def _count_flops(exported: ExportedGraph) -> dict[fx.Node, int]:
    flops: dict[fx.Node, int] = {}
    by_call: dict[str, int] = {}  # flops of an operator on these shapes
    values = [node.meta.get("val") for node in exported.graph.nodes]
    fake = detect_fake_mode([value for value in values if isinstance(value, Tensor)])
    if fake is None:
        return flops

    with fake, torch.no_grad(), FlopCounterMode(display=False) as counter:
        for node in exported.graph.nodes:
            if node.op != "call_function" or node.target is getitem or not node.all_input_nodes:
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), partial(value_of, exported))
            shapes = tree_map(lambda x: x.shape if isinstance(x, Tensor) else x, (args, kwargs))
            call = f"{node.target} {shapes}"
            if call not in by_call:
                before = counter.get_total_flops()
                try:
                    node.target(*args, **kwargs)
                except Exception as error:
                    raise UsageError(f"{line_of_node(node)}: cannot be run by itself: {raised(error)[:200]}") from None
                by_call[call] = counter.get_total_flops() - before
            if by_call[call]:
                flops[node] = by_call[call]
    return flops
