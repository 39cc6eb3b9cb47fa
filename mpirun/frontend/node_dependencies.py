"""What each node of a traced graph needs, and what a stage computes for itself rather than receives.

A node is free if it needs no parameters and no random numbers, and is cheap:
masks, positions. Every stage that uses it computes it. The others, the body of
the graph, are computed once, each in its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from mpirun.frontend.errors import place
from mpirun.frontend.export_graph import Traced
from mpirun.frontend.subgraphs import attributes, regions
from schedgen.util.errors import UsageError, raised

aten = torch.ops.aten
STATISTICS = {aten.batch_norm.default: (3, 4), aten.instance_norm.default: (3, 4)}  # written, says no schema
CHEAP = 16  # flops a byte of output: a free node does no more


class Flow:
    def __init__(self, traced: Traced, flops: Mapping[fx.Node, int] | None = None) -> None:
        self.traced, self.graph = traced, traced.graph
        self.position = {node: index for index, node in enumerate(self.graph.nodes)}
        self.roots: dict[fx.Node, fx.Node] = {}  # of a node that shares memory with an earlier one
        self.writes: dict[fx.Node, list[fx.Node]] = {}  # by root, in order
        self.needs: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            written = [self.root(one) for one in _written(node, traced.state)]
            changed = [self.writes[root][-1] for root in map(self.root, node.all_input_nodes) if root in self.writes]
            self.needs[node] = list(dict.fromkeys([*node.all_input_nodes, *changed]))
            for one in _shared(node):
                self.roots[node] = self.root(one)
            for root in written:
                self.writes.setdefault(root, []).append(node)
        self.flops = _flops(traced) if flops is None else flops
        self.free: set[fx.Node] = set()
        spoiled: set[fx.Node] = set()  # memory that something not free writes to
        while True:
            self.free = set()
            for node in self.graph.nodes:
                if self.root(node) not in spoiled and self._free(node):
                    self.free.add(node)
            found = {root for root, nodes in self.writes.items() if any(node not in self.free for node in nodes)}
            if found == spoiled:
                break
            spoiled = found
        results = traced.output()[0]
        kept = [node for root, nodes in self.writes.items() if persistent(root) for node in nodes]
        ends = [one for node in results for one in self.writes.get(self.root(node), [])]
        self.alive = self.closure([*results, *ends, *kept], lambda node: True)
        body = self.alive - self.free
        self.body = [node for node in self.graph.nodes if node in body and node.op == "call_function"]

    def root(self, node: fx.Node) -> fx.Node:
        """Whose memory it is."""
        return self.roots.get(node, node)

    def final(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The writes to their memory, after which they are what later stages see."""
        return [one for node in nodes for one in self.writes.get(self.root(node), []) if one in self.alive]

    def closure(self, nodes: Iterable[fx.Node], inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """`nodes` and what they need, and so on for what is `inside`."""
        found = set(nodes)
        stack = list(found)
        while stack:
            node = stack.pop()
            if inside(node):
                new = {one for one in self.needs[node] if one in node.all_input_nodes or inside(one)} - found
                found |= new
                stack += new
        return found

    def ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.position.__getitem__)

    def draws(self, node: fx.Node) -> bool:
        """Whether it draws random numbers."""
        return _random(node, self.traced.state)

    def _free(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return node.target not in self.traced.parameters and node not in self.writes
        return (
            node.op == "call_function"
            and all(one in self.free for one in self.needs[node])
            and not self.draws(node)
            and self.flops.get(node, 0) <= CHEAP * size(node)
        )


def persistent(root: fx.Node) -> bool:
    """Whether changes to its memory outlive the forward: it is a buffer."""
    return root.op == "get_attr"


def size(node: fx.Node) -> int:
    """Bytes of its value."""
    return sum(one.numel() * one.element_size() for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor))


def _random(node: fx.Node, state: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    return any(_random(one, attributes(code)) for code, _ in regions(node, state) for one in code.graph.nodes)


def _written(node: fx.Node, state: Mapping[str, Any]) -> list[fx.Node]:
    """The arguments that it changes in place."""
    found = []
    for code, operands in regions(node, state):
        inner = dict(zip(code.graph.find_nodes(op="placeholder"), operands, strict=False))
        written = (one for each in code.graph.nodes for one in _written(each, attributes(code)))
        found += [inner[one] for one in written if one in inner]
    if isinstance(node.target, OpOverload):
        hidden = STATISTICS.get(node.target, ()) if len(node.args) > 5 and node.args[5] else ()
        for index, argument in enumerate(node.target._schema.arguments):
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            found += [given] * (isinstance(given, fx.Node) and (writes or index in hidden))
    return found


def _shared(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory its result may share."""
    if node.target is getitem:
        return [node.all_input_nodes[0]]
    if not isinstance(node.target, OpOverload) or all(one.alias_info is None for one in node.target._schema.returns):
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    return [given for argument, given in arguments if argument.alias_info is not None and isinstance(given, fx.Node)]


def _flops(traced: Traced) -> dict[fx.Node, int]:
    """Of the nodes that have any, as torch counts them."""
    found: dict[fx.Node, int] = {}
    known: dict[str, int] = {}  # of an operator on these shapes
    values = [node.meta.get("val") for node in traced.graph.nodes]
    fake = detect_fake_mode([value for value in values if isinstance(value, Tensor)])
    if fake is None:
        return found

    def value(node: fx.Node) -> Any:
        return node.meta["val"] if "val" in node.meta else traced.state[str(node.target)]

    with fake, torch.no_grad(), FlopCounterMode(display=False) as counter:
        for node in traced.graph.nodes:
            if node.op != "call_function" or node.target is getitem or not node.all_input_nodes:
                continue
            given = fx.node.map_arg((node.args, node.kwargs), value)
            shapes = tree_map(lambda one: one.shape if isinstance(one, Tensor) else one, given)
            key = f"{node.target} {shapes}"
            if key not in known:
                before = counter.get_total_flops()
                try:
                    node.target(*given[0], **given[1])
                except Exception as error:
                    raise UsageError(f"{place(node)}: cannot be run by itself: {raised(error)[:200]}") from None
                known[key] = counter.get_total_flops() - before
            if known[key]:
                found[node] = known[key]
    return found
