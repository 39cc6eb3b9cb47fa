"""`mpirun.split`: any module that torch.export can trace, as stages.

1. Export the forward as a graph (export_graph).
2. Find what each node needs (node_dependencies).
3. Choose the nodes that begin stages (cut_points): none lies between a value and a change of it in place.
4. Decide whether parameters that several stages use are sent or replicated.
5. Build a module for each stage (stage_modules).

With buckets there is a graph for each, cut at the same places, and a stage has one module for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn

from mpirun.model.contract import Origin
from mpirun.model.dataflow import check_reads
from mpirun.model.meta_values import Init, meta_module
from mpirun.model.module_tensors import own_tensors, temporary_buffers, tensor_aliases
from mpirun.model.split.cut_points import (
    balanced_stages,
    check_changes_in_place,
    module_names,
    starts_at_modules,
    starts_at_pipe_splits,
)
from mpirun.model.split.errors import warn_user
from mpirun.model.split.export_graph import export_graph
from mpirun.model.split.node_dependencies import Dependencies
from mpirun.model.split.split_result import Call, Cut, bucket_sizes, of_bucket
from mpirun.model.split.stage_modules import BucketStage, StageBuilder, keep_eval_mode
from schedgen.util.errors import UsageError

SHARED = ("transmit", "replicate")


def split(
    module: nn.Module,
    example: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    points: Collection[str] = (),
    shared: str = "transmit",
    init: Init | None = None,
    buckets: Iterable[int] = (),
) -> Cut:
    """The stages of `module`, traced on the example of one microbatch's input.

    `example`: a tensor, a tuple of args or a mapping of kwargs; `example_kwargs`: the kwargs if there are args, too.
    The module is cut where submodules named in `points` begin and where its source calls `pipe_split()`; if there are
    none, into `stages` parts that cost about the same (flops plus bytes of parameters) and send little. `shared`:
    whether parameters that several stages use are sent by the first ("transmit") or copied and tied ("replicate").
    `init`: for a module on the meta device, a function that gives a submodule its own parameters and buffers, in
    place, on the ranks that build them (default: the model's _init_weights, or the submodule's reset_parameters).
    `buckets`: sizes that dimension 1 of the input may have, as of Engine: the module is traced on each, which replaces
    the example's size in all dimensions but 0, and is cut where the first is.
    UsageError, with the line of the model that is the reason, if the module cannot be split.
    """
    args, kwargs = _call(example, example_kwargs)
    if not isinstance(module, nn.Module):
        raise UsageError(f"split takes an nn.Module, not {type(module).__name__}")
    if shared not in SHARED:
        raise UsageError(f"shared should be 'transmit' or 'replicate', not {shared!r}")
    if not module.training:
        warn_user(f"{type(module).__name__} is in eval mode and is traced so: its dropout does nothing")
    if any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules()):
        warn_user(f"torch.compile of {type(module).__name__} is lost: stages run the operations that are traced")
    meta = meta_module(module, init)
    sizes = bucket_sizes(buckets)
    calls = [of_bucket((args, kwargs), size) for size in sizes] or [(args, kwargs)]
    try:
        traces = [_trace(module, *call) for call in calls]
    except UsageError as error:
        raise error.with_traceback(None) from None  # each rank prints it, if the script has made no Engine yet
    starts: list[list[fx.Node]] = []  # by trace
    for dependencies in traces:
        found = [node.name for of_trace in starts[:1] for node in of_trace]
        starts.append(_starts(dependencies, module, stages, points, found))
        check_changes_in_place(dependencies, starts[-1])
    aliases, in_eval_mode = tensor_aliases(module), not any(part.training for part in module.modules())

    def cut_at(starts: Sequence[Sequence[fx.Node]]) -> Cut:
        modules = [BucketStage() for _ in range(len(starts[0]) + 1)]
        cuts = [_build_stages(trace, at, shared, modules) for trace, at in zip(traces, starts, strict=True)]
        cut = cuts[0]
        if sizes:
            _check_alike(dict(zip(sizes, cuts, strict=True)), own_tensors(module).keys())
            examples = [trace.exported.example for trace in traces]
            example = examples[0]._replace(buckets=dict(zip(sizes, examples, strict=True)))
            cut = cut._replace(stages=[*modules], example=example)
        if in_eval_mode:
            keep_eval_mode(cut.stages)
        unused = _unused(module, cut.stages, aliases)
        origin = Origin(named=True, aliases=aliases, unused=unused)
        return cut._replace(meta=meta, join=join, origin=origin)

    def join(numbers: Sequence[int]) -> Cut:
        return cut_at([[of_trace[begin - 1] for begin in accumulate(numbers[:-1])] for of_trace in starts])

    return cut_at(starts)


def _build_stages(
    dependencies: Dependencies, starts: Sequence[fx.Node], shared: str, modules: Sequence[BucketStage]
) -> Cut:
    stage_of = _stages_of_nodes(dependencies, starts)
    used_by = _stages_of_shared_parameters(dependencies, stage_of)
    results, output = dependencies.exported.output()
    senders = {name: users[0] for name, users in used_by.items() if shared == "transmit"}
    built = StageBuilder(dependencies, stage_of, results, senders, modules).build()
    check_reads(built.reads, len(built.modules))
    bodies: list[list[fx.Node]] = [[] for _ in built.modules]
    for node in dependencies.body:
        bodies[stage_of[node]].append(node)
    return Cut(
        built.modules,
        built.reads,
        [[(stage, name) for stage in users] for name, users in used_by.items() if name not in senders],
        [_stage_name(nodes) for nodes in bodies],
        dependencies.exported.example,
        output,
        tuple(sum(dependencies.flops.get(node, 0) for node in nodes) for nodes in bodies),
        built.sent_bytes,
    )


def _check_alike(cuts: Mapping[int, Cut], names: Collection[str]) -> None:
    """UsageError unless the cuts of all buckets have the same parameters and buffers, of these names, and edges."""

    def of_stages(cut: Cut) -> tuple[object, ...]:
        return [own_tensors(stage).keys() & names for stage in cut.stages], cut.reads, cut.tied, cut.output

    (first, one), *others = cuts.items()
    for size in [size for size, other in others if of_stages(other) != of_stages(one)]:
        raise UsageError(
            f"buckets: for {size} stages would have other parameters, or send other values, than for {first}: cut "
            "elsewhere, by points="
        )


def _call(example: Any, example_kwargs: Mapping[str, Any] | None) -> Call:
    if not isinstance(example_kwargs, Mapping | None):
        raise UsageError(f"example_kwargs should be a mapping from names, not {type(example_kwargs).__name__}")
    if not isinstance(example, Mapping):
        return example if isinstance(example, tuple) else (example,), dict(example_kwargs or {})
    if example_kwargs:
        raise UsageError("an example that is a mapping gives the kwargs, and so do example_kwargs: give one of them")
    return (), dict(example)


def _trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dependencies:
    """The module's graph, and what each node of it needs; UsageError if nothing depends on its parameters."""
    dependencies = Dependencies(export_graph(module, args, kwargs))
    if not dependencies.body:
        raise UsageError(f"{type(module).__name__} has no computation that depends on its parameters")
    return dependencies


def _starts(
    dependencies: Dependencies, module: nn.Module, stages: int | None, points: Collection[str], found: Collection[str]
) -> list[fx.Node]:
    """The nodes that begin stages; `found`: their names in another bucket's graph, where their costs chose them."""
    marked, named = starts_at_pipe_splits(dependencies), starts_at_modules(dependencies, module, points)
    starts = dependencies.ordered({*marked, *named})
    if len(starts) < len(marked) + len(named):
        raise UsageError("points: one of them is where pipe_split() is called")
    if not starts:
        if stages is None:
            raise UsageError("say how many stages, or at which points to cut")
        if found:
            return [node for node in dependencies.body if node.name in found]
        return balanced_stages(dependencies, stages)
    if stages not in (None, len(starts) + 1):
        raise UsageError(f"points and pipe_split() make {len(starts) + 1} stages, not {stages}")
    return starts


def _stages_of_nodes(dependencies: Dependencies, starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    stage_of: dict[fx.Node, int] = {}
    for node in dependencies.body:
        if node.target is getitem:  # stays with the node whose result it is a part of
            stage_of[node] = stage_of[node.all_input_nodes[0]]
        else:
            position = dependencies.position
            stage_of[node] = sum(position[start] <= position[node] for start in starts)
    if len({*stage_of.values()}) <= len(starts):
        raise UsageError(f"one of {len(starts) + 1} stages would have no computation")
    return stage_of


def _stages_of_shared_parameters(dependencies: Dependencies, stage_of: Mapping[fx.Node, int]) -> dict[str, list[int]]:
    """By trained parameter that several stages use, these stages; the last one uses what the module returns."""
    parameters = dependencies.exported.parameters
    users = {**stage_of, dependencies.graph.output_node(): max(stage_of.values())}
    stages = {
        str(node.target): sorted({users[user] for user in node.users if user in users})
        for node in dependencies.graph.find_nodes(op="get_attr")
        if node.target in parameters and parameters[str(node.target)].requires_grad
    }
    return {name: several for name, several in stages.items() if len(several) > 1}


def _unused(module: nn.Module, stages: Sequence[nn.Module], aliases: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """By name, the parameters and saved buffers of a module that none of its stages has; `aliases`: as in `Origin`."""
    used = {name for stage in stages for name in own_tensors(stage)} | temporary_buffers(module)
    tensors = own_tensors(module).items()
    return {name: tensor for name, tensor in tensors if used.isdisjoint((name, *aliases.get(name, ())))}


def _stage_name(nodes: Sequence[fx.Node]) -> str:
    names = [name for name in ((module_names(node) or [""])[-1] for node in nodes) if name] or ["the module itself"]
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"
