"""A stage's module, built from its entry in `Model.stages`: the same weights on whichever rank, whatever the cut."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mpirun.model.contract import Model
from mpirun.model.rng import derived_seed
from schedgen.util.errors import UsageError, raised


def build_stage(model: Model, stage: int, seed: int) -> nn.Module:
    """The module of a stage, its weights seeded by the names of its layers, or else by the stage's index.

    Tied parameters have the value of the tie's first; those that the stage has twice are one. UsageError where the
    model's function fails, or a tie names what is not there.
    """
    module = _untied(model, stage, seed)
    for tie in model.tied:
        if any(place == stage for place, _ in tie) and not model.ties_shards(tie):  # shards of one stage are equal
            _apply_tie(model, module, stage, tie, seed)
    return module


def _apply_tie(model: Model, module: nn.Module, stage: int, tie: Sequence[tuple[int, str]], seed: int) -> None:
    first_stage, first_name = tie[0]
    first_module = module if first_stage == stage else _untied(model, first_stage, seed)
    first = _parameter(first_module, first_stage, first_name)
    names = [name for place, name in tie if place == stage]
    for copied in [_parameter(module, stage, name) for name in names]:
        if (copied.shape, copied.dtype) != (first.shape, first.dtype):
            raise UsageError(
                f"the model ties {first_name} of stage {first_stage}, {first.dtype} of shape "
                f"{tuple(first.shape)}, to {copied.dtype} of shape {tuple(copied.shape)} in stage {stage}"
            )
    kept = _parameter(module, stage, names[0])
    kept.data.copy_(first.data)
    for name in names[1:]:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, kept)


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise UsageError(f"the model ties {name} of stage {stage}, which has no such parameter") from None


def _untied(model: Model, stage: int, seed: int) -> nn.Module:
    """The module as its entry builds it. An entry with an attribute `seeded` is seeded by that, not by the stage."""
    entry = model.stages[stage]
    if isinstance(entry, nn.Module):
        return copy.deepcopy(entry)
    source = stage // model.tensor_parallel
    if isinstance(entry, Mapping):
        return nn.Sequential(OrderedDict((name, _call(source, make, seed, name)) for name, make in entry.items()))
    return _call(source, entry, seed, getattr(entry, "seeded", f"stage {source}"))


def _call(stage: int, make: Callable[[], nn.Module], seed: int, name: str) -> nn.Module:
    torch.manual_seed(derived_seed(seed, name))
    try:
        module = make()
    except UsageError as error:
        raise UsageError(f"stage {stage} of the model cannot be built: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"stage {stage} of the model cannot be built: {raised(error)}") from None
    if not isinstance(module, nn.Module):
        raise UsageError(f"stage {stage} of the model should be an nn.Module, not {type(module).__name__}")
    return module
