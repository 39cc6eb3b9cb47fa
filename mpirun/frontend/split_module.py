"""Any module that torch.export can trace, as stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem
from typing import Any

from torch import fx, nn

from mpirun.data.microbatches import Dims
from mpirun.frontend.batch_coupling import warn
from mpirun.frontend.cut_points import automatic, marked, modules, named
from mpirun.frontend.dynamic_sizes import fewer, merged
from mpirun.frontend.errors import note, unknown
from mpirun.frontend.export_graph import trace
from mpirun.frontend.inplace import separate, separate_inputs, settle
from mpirun.frontend.meta_device import Init, values_of
from mpirun.frontend.node_dependencies import Flow
from mpirun.frontend.split_result import Cut
from mpirun.frontend.stage_modules import Builder
from schedgen.util.errors import UsageError

WAYS = ("transmit", "replicate")


def split(
    module: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    points: Collection[str] = (),
    costs: Mapping[str, float] | None = None,
    shared: str | Mapping[str, str] = "transmit",
    dims: Dims = None,
    init: Init | None = None,
) -> Cut:
    """The stages of `module`, traced on the example of one microbatch's input.

    It is cut where submodules named in `points` begin and where its source calls `pipe_split()`; if there are
    none, into `stages` balanced parts between which little is sent. `costs`, by submodule, replace the estimate
    of what they cost, flops and bytes of parameters; others then cost nothing. `shared`: whether a parameter
    that several stages use is sent by the first ("transmit") or copied and tied ("replicate"), or that by name.
    `dims`: along which dimension the example's samples lie, a number, or nested as args, kwargs or (args, kwargs),
    None for what is not of samples: it is traced a second time, and microbatches may have a sample less.
    `init`: of a module on the meta device, what gives a submodule its own parameters and buffers, in place, on the
    ranks that build them (the default is its reset_parameters).
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"split takes an nn.Module, not {type(module).__name__}")
    if not isinstance(example_args, tuple):
        example_args = (example_args,)
    if isinstance(points, str) or not isinstance(points, Collection):
        raise UsageError(f"points should be names of submodules, not {points!r}")
    for what, given in (("example_kwargs", example_kwargs), ("costs", costs)):
        if not isinstance(given, Mapping | None):
            raise UsageError(f"{what} should be a mapping from names, not {type(given).__name__}")
    if not isinstance(shared, str | Mapping):
        raise UsageError(f"shared should be 'transmit' or 'replicate', or a mapping to these, not {shared!r}")
    if not module.training:
        note(f"{type(module).__name__} is in eval mode and is traced so: its dropout does nothing")
    if stages is not None and type(stages) is not int:
        raise UsageError(f"stages should be a whole number, not {stages!r}")
    example_kwargs, values = dict(example_kwargs or {}), values_of(module, init)
    traced = trace(module, example_args, example_kwargs)
    if dims is not None:
        smaller = fewer(example_args, example_kwargs, dims)
        try:
            other = trace(module, *smaller)
        except UsageError as error:
            raise UsageError(f"with a sample less: {error}") from None
        traced = merged(traced, other)
    flow = separate_inputs(settle(Flow(traced)))
    if not flow.body:
        raise UsageError(f"{type(module).__name__} has no computation that depends on its parameters")
    starts = _starts(flow, module, stages, points, costs)
    flow, starts = separate(flow, starts)
    stage_of: dict[fx.Node, int] = {}
    for node in flow.body:
        behind = sum(flow.position[start] <= flow.position[node] for start in starts)
        stage_of[node] = stage_of[node.all_input_nodes[0]] if node.target is getitem else behind
    if len({*stage_of.values()}) <= len(starts):
        raise UsageError(f"one of {len(starts) + 1} stages would have no computation")
    uses = _uses(flow, stage_of)
    sent = {name for name, way in _ways(flow, shared).items() if way == "transmit"}
    results, output = flow.traced.output()
    owners = {name: found[0] for name, found in uses.items() if name in sent}
    made = Builder(flow, stage_of, results, owners).build()
    warn(module)
    return Cut(
        made.modules,
        made.reads,
        [[(stage, name) for stage in found] for name, found in uses.items() if name not in sent],
        [_name(flow, stage_of, stage) for stage in range(len(made.modules))],
        flow.traced.example,
        output,
        tuple(
            sum(flow.flops.get(node, 0) for node in flow.body if stage_of[node] == stage)
            for stage in range(len(made.modules))
        ),
        made.bytes,
        values,
    )


def _starts(
    flow: Flow, module: nn.Module, stages: int | None, points: Collection[str], costs: Mapping[str, float] | None
) -> list[fx.Node]:
    marks, ours = marked(flow), named(flow, module, points)
    found = flow.ordered({*marks, *ours})
    if len(found) < len(marks) + len(ours):
        raise UsageError("points: one of them is where pipe_split() is called")
    if not found:
        if stages is None:
            raise UsageError("say how many stages, or at which points to cut")
        return automatic(flow, module, stages, costs)
    if costs is not None:
        raise UsageError("costs choose where stages begin, but points or pipe_split() say so")
    if stages not in (None, len(found) + 1):
        raise UsageError(f"points and pipe_split() make {len(found) + 1} stages, not {stages}")
    return found


def _uses(flow: Flow, stage_of: Mapping[fx.Node, int]) -> dict[str, list[int]]:
    """The stages that use each trained parameter that several do."""
    uses = {
        str(node.target): sorted({stage_of[user] for user in node.users if user in stage_of})
        for node in flow.graph.find_nodes(op="get_attr")
        if node.target in flow.traced.parameters and flow.traced.parameters[str(node.target)].requires_grad
    }
    return {name: found for name, found in uses.items() if len(found) > 1}


def _ways(flow: Flow, shared: str | Mapping[str, str]) -> dict[str, str]:
    """Of each parameter what is to be done where several stages use it."""
    given = dict.fromkeys(flow.traced.parameters, shared) if isinstance(shared, str) else shared
    for name, way in given.items():
        if name not in flow.traced.parameters:
            raise unknown("shared: the parameter", name, flow.traced.parameters)
        if way not in WAYS:
            raise UsageError(f"shared: {way!r} is neither 'transmit' nor 'replicate'")
    return dict.fromkeys(flow.traced.parameters, "transmit") | dict(given)


def _name(flow: Flow, stage_of: Mapping[fx.Node, int], stage: int) -> str:
    """The first and the last module in a stage."""
    found = [(modules(node) or [""])[-1] for node in flow.body if stage_of[node] == stage]
    inside = [name for name in found if name] or ["the module itself"]
    return inside[0] if inside[0] == inside[-1] else f"{inside[0]} to {inside[-1]}"
