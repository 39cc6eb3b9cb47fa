"""A module for each stage of an exported graph, what it reads from others, and what it sends to them.

A graph is traced in one mode, whose decisions are constants in it: whether a dropout drops, whether BatchNorm uses the
batch's statistics. These follow `train()` and `eval()` of a stage; any other difference is as it was traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from mpirun.model.dataflow import Input, Source, Value
from mpirun.model.meta_values import like
from mpirun.model.rng import RandomOp
from mpirun.model.split.node_dependencies import Dependencies, arguments_of, is_buffer, value_bytes, value_of
from schedgen.util.errors import UsageError

aten = torch.ops.aten
LAYERS = "__layers__"  # the submodule that holds a stage's operations that draw, follow the mode or are in a region
RANDOM_OPS = "__draws__"  # that of those that draw, by whose names they are seeded

EVAL_VALUES = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}  # by aten's parameter
COUNTER = "num_batches_tracked"  # the buffer that normalisations count in, in train mode only


class TracedOp(nn.Module):
    """An operation as it was traced, as a layer: it draws, follows train and eval mode, or is in a region."""

    def __init__(
        self,
        operation: Callable[..., Any],
        in_eval: Mapping[int | str, Any],
        counts: bool,
        regions: Sequence[tuple[Callable[..., Any], Sequence[Any]]],
    ) -> None:
        """`in_eval`: by position or keyword of an argument, its value in eval mode; `regions`: as in `ExportedGraph`.

        `counts`: it changes a counter in place, the first argument, but not in eval mode.
        """
        super().__init__()
        self.operation, self.in_eval, self.counts, self.regions = operation, in_eval, counts, regions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operation's result."""
        if self.counts and not self.training:
            return args[0]
        if self.in_eval and not self.training:
            args = tuple(self.in_eval.get(position, argument) for position, argument in enumerate(args))
            kwargs |= {name: value for name, value in self.in_eval.items() if isinstance(name, str)}
        if not self.regions:
            return self.operation(*args, **kwargs)
        with ExitStack() as inside:
            for region, arguments in self.regions:
                inside.enter_context(region(*arguments))
            return self.operation(*args, **kwargs)


class DrawingOp(TracedOp, RandomOp):
    """One that draws."""


def keep_eval_mode(stages: Iterable[nn.Module]) -> None:
    """For a module traced in eval mode: what drops there, or uses batch statistics, does so in both modes."""
    for stage in stages:
        for part in stage.modules():
            if isinstance(part, TracedOp):
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
            changed[parameter.name if position >= len(node.args) else position] = value
    return changed


class Constant:
    """What a graph refers to; equal if it is one object, or tensors of equal values."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Whether they are the same."""
        mine, its = self.value, other.value if isinstance(other, Constant) else None
        if mine is its or not (isinstance(mine, Tensor) and isinstance(its, Tensor)):
            return mine is its
        alike = (mine.shape, mine.dtype) == (its.shape, its.dtype)
        return alike and not mine.is_meta and bool(((mine == its) | (mine.isnan() & its.isnan())).all())

    __hash__ = None  # type: ignore[assignment]


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
        states = self.exported.graph.find_nodes(op="get_attr")
        self.counters = [node for node in states if str(node.target).rpartition(".")[2] == COUNTER]
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
        outputs, of = self.results if stage == self.count - 1 else self.sent[stage], self.dependencies
        # After these, memory has the values that later stages see.
        writes = [write for node in outputs for write in of.writes.get(of.root(node), []) if write in of.alive]
        writes += [node for root, nodes in of.writes.items() if is_buffer(root) for node in nodes]
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
        draws, counts = self.dependencies.draws(node), changes_counter(node, self.counters)
        in_eval = {} if counts else eval_arguments(node)
        regions = node.meta.get("regions", ()) if isinstance(operation, OpOverload) else ()
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
        if not (draws or counts or in_eval or regions):
            return graph.create_node("call_function", operation, args, kwargs, node.name)
        layer = (DrawingOp if draws else TracedOp)(operation, in_eval, counts, regions)
        where, name = (RANDOM_OPS, node.name) if draws else (LAYERS, f"{node.name}_op")  # "to" could be no module
        path, is_new = root.name_of(f"{where}.{name}", [type(layer), operation, in_eval, counts, [*regions]])
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
