"""Layers, or an nn.Sequential, as stages: runs of layers or children, each of which sends one tensor to the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from mpirun.model.contract import Layers, Origin
from mpirun.model.dataflow import Input, Value
from mpirun.model.meta_values import Init, meta_module
from mpirun.model.module_tensors import shared_parameters, tensor_aliases
from mpirun.model.split.cut_points import even_starts
from mpirun.model.split.errors import check_hooks, line_of_forward, unknown_name, warn_user
from mpirun.model.split.split_result import Cut
from schedgen.util.errors import UsageError


def split_sequential(module: nn.Sequential, stages: int | Sequence[str | int], init: Init | None = None) -> Cut:
    """The children of `module` as stages, in a chain.

    `stages`: how many, then they have children as equal in number as possible; or the names (or indices) of the
    children that begin the second stage, the third and so on; the first child's may be among them. Parameters that
    several children share are tied. `init`: as for `split`.
    """
    if not isinstance(module, nn.Sequential):
        raise UsageError(
            f"split_sequential takes an nn.Sequential, not {type(module).__name__}; split takes any module"
        )
    if type(module).forward is not nn.Sequential.forward:
        raise UsageError(
            f"{line_of_forward(module)}: does more than call the children one after the other; split takes any module"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise UsageError(f"{type(module).__name__} has a hook of its own, which would not be called")
    check_hooks(module)
    if module._compiled_call_impl is not None:
        warn_user("Module.compile of the Sequential is lost: compile its children")
    names = list(module._modules)
    starts = _counted_starts(names, stages) if isinstance(stages, int) else _named_starts(names, stages)
    runs = [names[a:b] for a, b in zip(starts, [*starts[1:], len(names)], strict=True)]
    parts: list[nn.Module] = [nn.Sequential(OrderedDict((name, module._modules[name]) for name in run)) for run in runs]
    for part in parts:
        part.training = module.training
    return Cut(
        parts,
        [[Input(0) if stage == 0 else Value(stage - 1, 0)] for stage in range(len(parts))],
        shared_parameters(parts),
        [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs],
        meta=meta_module(module, init),
        origin=Origin(named=True, aliases=tensor_aliases(module)),
    )


def split_layers(layers: Layers, stages: int) -> list[Layers]:
    """`stages` runs of `layers`, as `Model.stages` takes them; the first ones are longer if not all can be equal."""
    if stages > len(layers):
        raise UsageError(f"it has {len(layers)} layers, too few for {stages} stages")
    names = list(layers)
    starts = [*even_starts(len(names), stages), len(names)]
    return [{name: layers[name] for name in names[start:end]} for start, end in pairwise(starts)]


def _counted_starts(names: Sequence[str], stages: int) -> list[int]:
    if stages < 1:
        raise UsageError(f"{stages} stages: there should be one at least")
    if stages > len(names):
        raise UsageError(f"the Sequential has {len(names)} children, too few for {stages} stages")
    return even_starts(len(names), stages)


def _named_starts(names: Sequence[str], points: Sequence[str | int]) -> list[int]:
    chosen = [names[p] if isinstance(p, int) and -len(names) <= p < len(names) else str(p) for p in points]
    if unknown := [name for name in chosen if name not in names]:
        raise unknown_name("the child", unknown[0], names)
    starts = [names.index(name) for name in chosen]
    starts = starts if starts[:1] == [0] else [0, *starts]
    if any(start >= following for start, following in pairwise(starts)):
        raise UsageError(f"stages begin at children in their order, not at {chosen}")
    return starts
