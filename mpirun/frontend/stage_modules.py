"""A module for each stage of a traced graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from mpirun.frontend.dynamic_sizes import SHAPES
from mpirun.frontend.node_dependencies import Flow, size
from mpirun.frontend.size_and_device_lookup import bind, sized
from mpirun.frontend.subgraphs import attributes
from mpirun.model.dataflow import Input, Source, Value
from mpirun.model.rng import RandomOp

aten = torch.ops.aten
DRAWS = "__draws__"  # the submodule that has its layers that draw


class Stages(NamedTuple):
    modules: list[nn.Module]
    reads: list[list[Source]]
    bytes: dict[Value, int]


class Builder:
    def __init__(
        self, flow: Flow, stage_of: Mapping[fx.Node, int], results: Sequence[fx.Node], owners: Mapping[str, int]
    ) -> None:
        """`stage_of`: the nodes of the body. `owners`: of the parameters that are sent to other stages."""
        self.flow, self.stage_of, self.results, self.owners = flow, stage_of, results, owners
        self.count = max(stage_of.values()) + 1
        self.sent: list[set[fx.Node]] = [set() for _ in range(self.count)]
        self.copied: set[str] = set()  # parameters and buffers that a stage has already

    def build(self) -> Stages:
        nodes = [self._nodes(stage) for stage in reversed(range(self.count))][::-1]
        sends = [self.flow.ordered(sent) for sent in self.sent[:-1]] + [list(self.results)]
        modules: list[nn.Module] = []
        reads: list[list[Source]] = []
        sizes: dict[Value, int] = {}
        for stage, found in enumerate(nodes):
            foreign = [node for node in found if not self._here(node, stage)]
            foreign += self._size(found, foreign)
            modules.append(self._module(stage, found, foreign, sends[stage]))
            reads.append([])
            for node in foreign:
                maker = self._maker(node)
                value = None if maker is None else Value(maker, sends[maker].index(node))
                reads[-1].append(Input(self.flow.traced.inputs[node]) if value is None else value)
                if value is not None:
                    sizes[value] = size(node)
        return Stages(modules, reads, sizes)

    def _size(self, found: Sequence[fx.Node], foreign: Sequence[fx.Node]) -> list[fx.Node]:
        """An input that shows the size of the microbatch, where a stage needs it and sees it nowhere else."""
        if any(SHAPES in node.meta for node in foreign) or not any(sized(x, self.flow.traced.state) for x in found):
            return []
        return [next(node for node in self.flow.traced.inputs if SHAPES in node.meta)]

    def _nodes(self, stage: int) -> list[fx.Node]:
        """All that a stage computes or reads; what it reads is added to what others send."""
        ends = self.results if stage == self.count - 1 else self.sent[stage]
        kept = [node for root, nodes in self.flow.writes.items() if root.op == "get_attr" for node in nodes]
        writes = [node for node in [*self.flow.final(ends), *kept] if self._here(node, stage)]
        found = self.flow.closure([*ends, *writes], lambda node: self._here(node, stage))
        for node in found:
            maker = self._maker(node)
            if maker is not None and not self._here(node, stage):
                self.sent[maker].add(node)
        return self.flow.ordered(found)

    def _maker(self, node: fx.Node) -> int | None:
        """The stage that sends it; None: every stage has it."""
        return self.owners.get(str(node.target)) if node.op == "get_attr" else self.stage_of.get(node)

    def _here(self, node: fx.Node, stage: int) -> bool:
        """Whether a stage has or computes it."""
        return node.op != "placeholder" and self._maker(node) in (None, stage)

    def _module(
        self, stage: int, nodes: Sequence[fx.Node], foreign: Sequence[fx.Node], sends: Sequence[fx.Node]
    ) -> fx.GraphModule:
        graph, root = fx.Graph(), nn.Module()
        new = {node: graph.placeholder(node.name) for node in foreign}
        for node in nodes:
            if node not in new:
                new[node] = self._drawing(root, graph, node, new) or graph.node_copy(node, new.__getitem__)
                if node.target is aten.view.default and self.flow.root(node) not in self.flow.writes:
                    new[node].target = aten.reshape.default  # what is received is contiguous, whatever was traced
                if node.op == "get_attr":
                    self._put(root, str(node.target))
        for node, copied in new.items():  # the rest holds fake tensors
            copied.meta = {key: node.meta[key] for key in ("stack_trace", SHAPES) if key in node.meta}
        bind(graph, attributes(root, graph))
        outputs = [
            graph.call_function(aten.clone.default, (new[node],)) if node.op == "get_attr" else new[node]
            for node in sends
        ]
        graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        module = fx.GraphModule(root, graph, f"Stage{stage}")
        for name in self.flow.traced.temporary & {name for name, _ in module.named_buffers()}:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner)._non_persistent_buffers_set.add(last)
        module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = {  # its copies would save these otherwise
            "_non_persistent_buffers_set": module._non_persistent_buffers_set
        }
        return module

    def _drawing(
        self, root: nn.Module, graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node]
    ) -> fx.Node | None:
        """A node that draws random numbers, as a layer."""
        if node.op != "call_function" or not self.flow.draws(node):
            return None
        if not hasattr(root, DRAWS):
            root.add_module(DRAWS, nn.Module())
        root.get_submodule(DRAWS).add_module(node.name, RandomOp(node.target))  # type: ignore[arg-type]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
        return graph.create_node("call_module", f"{DRAWS}.{node.name}", args, kwargs, node.name)

    def _put(self, root: nn.Module, name: str) -> None:
        """The parameter itself in the first stage that has it, else a copy."""
        value = self.flow.traced.state[name]
        owner, _, last = name.rpartition(".")
        for part in owner.split(".") if owner else ():
            if not hasattr(root, part):
                root.add_module(part, nn.Module())
            root = getattr(root, part)
        if isinstance(value, nn.Parameter):
            setattr(root, last, copy.deepcopy(value) if name in self.copied else value)
            self.copied.add(name)
        elif isinstance(value, Tensor):
            root.register_buffer(last, value.detach().clone())
        else:
            setattr(root, last, copy.deepcopy(value))
