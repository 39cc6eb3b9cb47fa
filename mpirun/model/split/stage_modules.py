"""A module for each stage of an exported graph, what it reads from others, and what it sends to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from mpirun.model.dataflow import Input, Source, Value
from mpirun.model.meta_values import like
from mpirun.model.rng import RandomOp
from mpirun.model.split.node_dependencies import Dependencies, is_buffer, value_bytes, value_of
from mpirun.model.split.train_eval import Constant, RegionOp, counters_of, mode_op
from schedgen.util.errors import UsageError

aten = torch.ops.aten
LAYERS = "__layers__"  # the submodule that holds a stage's operations that draw, follow the mode or are in a region
RANDOM_OPS = "__draws__"  # that of those that draw, by whose names they are seeded


class BucketStage(nn.Module):
    """A stage with a graph for each bucket, all of them on its one set of parameters and buffers.

    graphs  by the shapes of the arguments of forward, the function that the graph generates
    known   by name of an operation, parameter, buffer or constant, what tells it from others of that name
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}
        self.known: dict[str, object] = {}

    def forward(self, *inputs: Tensor) -> Any:
        """The result of the graph for inputs of these shapes."""
        return self.graphs[tuple(x.shape for x in inputs)](self, *inputs)

    def name_of(self, name: str, what: object) -> tuple[str, bool]:
        """The name here of what a graph calls `name`, and whether it is new: another graph may have it, or another."""
        while self.known.get(name, what) != what:
            name += "_"
        return name, self.known.setdefault(name, what) is what


class StageModules(NamedTuple):
    """The stages' modules, what each argument of their forwards is, and the bytes of each value that is sent."""

    modules: list[nn.Module]
    reads: list[list[Source]]
    sent_bytes: dict[Value, int]


class StageBuilder:
    """Builds the stages of a graph, from the stage of each node of its body."""

    def __init__(
        self,
        dependencies: Dependencies,
        stage_of: Mapping[fx.Node, int],
        results: Sequence[fx.Node],
        owners: Mapping[str, int],
        modules: Sequence[BucketStage],
    ) -> None:
        """`results`: what the last stage returns; `owners`: by parameter that is sent, the stage that sends it.

        `modules`: by stage; other buckets may have put graphs there.
        """
        self.dependencies, self.stage_of, self.results, self.owners = dependencies, stage_of, results, owners
        self.exported, self.modules = dependencies.exported, modules
        self.count = max(stage_of.values()) + 1
        self.counters = counters_of(self.exported.graph)
        self.sent: list[set[fx.Node]] = [set() for _ in range(self.count)]  # by stage
        self.placed: set[str] = set()  # parameters and buffers that a stage has already

    def build(self) -> StageModules:
        """All stages: from the last to the first, since a stage sends what later ones need."""
        nodes = [self._nodes(stage) for stage in reversed(range(self.count))][::-1]
        outputs = [self.dependencies.ordered(sent) for sent in self.sent[:-1]] + [list(self.results)]
        built = StageModules([], [], {})
        for stage, own in enumerate(nodes):
            received = [node for node in own if not self._is_here(node, stage)]
            built.modules.append(self._module(stage, own, received, outputs[stage]))
            built.reads.append([])
            for node in received:
                sender = self._sender(node)
                if sender is None:
                    built.reads[-1].append(Input(self.exported.inputs[node]))
                else:
                    value = Value(sender, outputs[sender].index(node))
                    built.reads[-1].append(value)
                    built.sent_bytes[value] = value_bytes(node)
        return built

    def _nodes(self, stage: int) -> list[fx.Node]:
        """The nodes that a stage computes or receives; the received ones are added to those that other stages send."""
        outputs = self.results if stage == self.count - 1 else self.sent[stage]
        writes = self.dependencies.final_writes(outputs)
        writes += [node for root, nodes in self.dependencies.writes.items() if is_buffer(root) for node in nodes]
        ends = [*outputs, *(node for node in writes if self._is_here(node, stage))]
        nodes = self.dependencies.closure(ends, lambda node: self._is_here(node, stage))
        for node in nodes:
            sender = self._sender(node)
            if sender is not None and sender != stage:
                self.sent[sender].add(node)
        return self.dependencies.ordered(nodes)

    def _sender(self, node: fx.Node) -> int | None:
        """The stage that has a node's value and sends it; None: every stage has or computes it."""
        return self.owners.get(str(node.target)) if node.op == "get_attr" else self.stage_of.get(node)

    def _is_here(self, node: fx.Node, stage: int) -> bool:
        return node.op != "placeholder" and self._sender(node) in (None, stage)

    def _module(
        self, stage: int, nodes: Sequence[fx.Node], received: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> fx.GraphModule:
        graph, root = fx.Graph(), self.modules[stage]
        new = {node: graph.placeholder(node.name) for node in received}
        for node in nodes:
            if node not in new:
                new[node] = self._copied(root, graph, node, new)
        for node, copied in new.items():  # the rest of meta holds fake tensors
            copied.meta = {"stack_trace": node.meta.get("stack_trace")}
        _insert_device_lookups(graph)
        returned = [
            graph.call_function(aten.clone.default, (new[node],)) if node.op == "get_attr" else new[node]
            for node in outputs
        ]
        graph.output(returned[0] if len(returned) == 1 else tuple(returned))
        module = fx.GraphModule(root, graph, f"Stage{stage}")
        forward, shapes = type(module).forward, tuple(value_of(self.exported, node).shape for node in received)
        if root.graphs.setdefault(shapes, forward).__code__ != forward.__code__:
            raise UsageError(
                f"buckets: stage {stage} gets the same shapes in several, but computes other values: cut elsewhere"
            )
        for name in self.exported.temporary & {name for name, _ in module.named_buffers()}:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._non_persistent_buffers_set.add(attribute)
        module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = {  # else copies of the module would save these
            "_non_persistent_buffers_set": module._non_persistent_buffers_set
        }
        return module

    def _copied(self, root: BucketStage, graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A copy of a node; a call of a layer if it draws, follows train and eval mode, or is in a region."""
        if node.op != "call_function":
            return graph.create_node("get_attr", self._put(root, str(node.target)), name=node.name)
        operation: Any = node.target
        if operation is aten.view.default and self.dependencies.root(node) not in self.dependencies.writes:
            operation = aten.reshape.default  # received values may have other strides than were traced
        layer, draws = mode_op(node, operation, self.counters), self.dependencies.draws(node)
        if isinstance(operation, OpOverload) and node.meta.get("regions"):
            layer = RegionOp(layer or operation, node.meta["regions"])
        if draws:
            layer = RandomOp(layer or operation)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
        if layer is None:
            return graph.create_node("call_function", operation, args, kwargs, node.name)
        where, name = (RANDOM_OPS, node.name) if draws else (LAYERS, f"{node.name}_op")  # "to" could be no module
        path, is_new = root.name_of(f"{where}.{name}", _traits(layer))
        if is_new:
            if not hasattr(root, where):
                root.add_module(where, nn.Module())
            root.get_submodule(where).add_module(path.rpartition(".")[2], layer)
        return graph.create_node("call_module", path, args, kwargs, node.name)

    def _put(self, stage: BucketStage, name: str) -> str:
        """Give a stage what `name` refers to, a parameter or buffer itself if no stage has it yet; its name there."""
        value, root = self.exported.state[name], cast("nn.Module", stage)
        put, is_new = stage.name_of(name, Constant(value))
        if not is_new:
            return put
        owner, _, attribute = put.rpartition(".")
        for part in owner.split(".") if owner else ():
            if not hasattr(root, part):
                root.add_module(part, nn.Module())
            root = getattr(root, part)
        if isinstance(value, Tensor):
            own = like(value, value.detach().clone()) if name in self.placed else value
            self.placed.add(name)
            if isinstance(own, nn.Parameter):
                setattr(root, attribute, own)
            else:
                root.register_buffer(attribute, own, name not in self.exported.temporary)
        else:
            setattr(root, attribute, copy.deepcopy(value))
        return put


def _traits(layer: nn.Module) -> list[object]:
    """What tells an operation from others of its name."""
    parts = [(type(part), vars(part)) for part in layer.modules()]
    return [(kind, {name: value for name, value in own.items() if name[0] != "_"}) for kind, own in parts]


def _insert_device_lookups(graph: fx.Graph) -> None:
    """Let a stage make new tensors where its values are, not where the example was."""
    like = next(iter([*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]), None)
    for node in list(graph.nodes) if like is not None else ():
        if any(isinstance(argument, torch.device) for argument in [*node.args, *node.kwargs.values()]):
            with graph.inserting_before(node):
                device = graph.call_function(getattr, (like, "device"))

            def replaced(argument: Any, device: fx.Node = device) -> Any:
                return device if isinstance(argument, torch.device) else argument

            node.args = tuple(map(replaced, node.args))
            node.kwargs = {name: replaced(argument) for name, argument in node.kwargs.items()}
