"""The names under which `Model.weights` may have the parameters and buffers of stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mpirun.model.contract import Model
from mpirun.model.module_tensors import own_tensors, temporary_buffers, tensor_aliases


def weight_names(model: Model, stage: int, module: nn.Module, prefix: str = "") -> dict[str, list[str]]:
    """By parameter and saved buffer of a module, the names that weights may have for it, its entry name first.

    `module`: the stage, or a part of it whose names in the stage begin with `prefix`.
    """
    temporary = temporary_buffers(module)
    names, aliases = [name for name in own_tensors(module) if name not in temporary], tensor_aliases(module)
    return {
        name: _candidates(model, stage, [f"{prefix}{own}" for own in (name, *aliases.get(name, ()))]) for name in names
    }


def unused_names(model: Model) -> dict[str, list[str]]:
    """The same of what is in no stage, because the forward of the module that was split does not use it."""
    return {name: _candidates(model, 0, [name]) for name in model.origin.unused}


def _candidates(model: Model, stage: int, names: Sequence[str]) -> list[str]:
    untied = model._replace(tied=())
    known = [model.entry_name(stage, names[0])]
    known += [untied.entry_name(*place) for tie in model.tied if (stage, names[0]) in tie for place in tie]
    known += [untied.entry_name(stage, name) for name in names]
    return list(dict.fromkeys([*known, *(alias for name in known for alias in model.origin.aliases.get(name, ()))]))
