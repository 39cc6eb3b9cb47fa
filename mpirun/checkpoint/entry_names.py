"""The entries of a stage in a checkpoint: the parameters' names in the model, which depend on no stage or rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mpirun.engine.core.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import Slice
from mpirun.model.weight_names import unused_names, weight_names
from schedgen.util.errors import UsageError


def parameter_entries(model: Model, stage: LocalStage) -> list[str | None]:
    """The entry of each of a stage's parameters; None for one that is written with another stage."""
    firsts = {key: tie[0][0] for tie in model.tied for key in tie}
    entries: list[str | None] = []
    for name in stage.names:
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries.append(slice_entry(entry, model.slice_of(stage.index)))
        else:
            entries.append(entry if firsts.get((stage.index, name), stage.index) == stage.index else None)
    return entries


def slice_entry(entry: str, slice: Slice) -> str:
    """What a tensor slice's share of a parameter is called until the shares are joined."""
    return f"{entry}@{slice.index}/{slice.count}"


def is_share(model: Model, stage: LocalStage, name: str) -> bool:
    """Whether a stage's tensor of this name is a tensor slice's share."""
    return model.slice_of(stage.index).count > 1 and name in stage.shape.sliced_dims


def known_names(model: Model, stages: Mapping[int, LocalStage]) -> list[list[str]]:
    """The names of each parameter and saved buffer of these stages, or of no stage, its entry first."""
    names = [known for index, stage in stages.items() for known in weight_names(model, index, stage.module).values()]
    return names + list(unused_names(model).values())


def untrained_tensors(stage: LocalStage) -> dict[str, Tensor]:
    """The frozen parameters and buffers of a stage's module by name: the tensors themselves.

    UsageError if the module has other state.
    """
    module = stage.module
    # Not by requires_grad, which a script may have changed since, as to train a generator through its discriminator.
    trained = {parameter.data_ptr() for name, parameter in module.named_parameters() if name in stage.names}
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    untrained: dict[str, Tensor] = {}
    for name in module.state_dict():
        if name not in own:
            raise UsageError(f"stage {stage.index} has {name}: only parameters and buffers are saved")
        if own[name].data_ptr() not in trained:
            untrained[name] = own[name].detach()
    return untrained


def written_untrained(model: Model, stage: LocalStage) -> dict[str, Tensor]:
    """The untrained tensors that are written, by entry: every share, and the first slice's copy of others."""
    entries: dict[str, Tensor] = {}
    for name, value in untrained_tensors(stage).items():
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries[slice_entry(entry, model.slice_of(stage.index))] = value
        elif model.is_first_slice(stage.index):
            entries[entry] = value
    return entries
