"""The entries of a stage in a checkpoint: the parameters' names in the model, which depend on no stage or rank."""

from __future__ import annotations

from torch import Tensor

from mpirun.engine.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import Shard


def parameter_entries(model: Model, stage: LocalStage) -> list[str | None]:
    """The entry of each of a stage's parameters; None for one that is written with another stage."""
    firsts = {key: tie[0][0] for tie in model.tied for key in tie}
    entries: list[str | None] = []
    for name in stage.names:
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries.append(shard_entry(entry, model.shard_of(stage.index)))
        else:
            entries.append(entry if firsts.get((stage.index, name), stage.index) == stage.index else None)
    return entries


def shard_entry(entry: str, shard: Shard) -> str:
    """The entry of a tensor shard's share of a parameter: NAME@t/T."""
    return f"{entry}@{shard.index}/{shard.count}"


def is_share(model: Model, stage: LocalStage, name: str) -> bool:
    """Whether what a stage has under a name is a tensor shard's share."""
    return model.shard_of(stage.index).count > 1 and name in stage.shape.sharded_dims


def untrained_tensors(stage: LocalStage) -> dict[str, Tensor]:
    """The frozen parameters and buffers of a stage's module by name: the tensors themselves."""
    trained = {parameter.data_ptr() for parameter in stage.module.parameters() if parameter.requires_grad}
    return {
        name: value
        for name, value in stage.module.state_dict().items()
        if name.endswith("_extra_state") or value.data_ptr() not in trained
    }


def untrained_entries(model: Model, stage: LocalStage) -> dict[str, Tensor]:
    """The untrained tensors by entry; a tensor shard's share is under the entry of the whole."""
    return {model.entry_name(stage.index, name): value for name, value in untrained_tensors(stage).items()}


def written_untrained(model: Model, stage: LocalStage) -> dict[str, Tensor]:
    """The untrained tensors that are written, by entry: every share, and from the first shard what all shards have."""
    entries: dict[str, Tensor] = {}
    for name, value in untrained_tensors(stage).items():
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries[shard_entry(entry, model.shard_of(stage.index))] = value
        elif model.is_first_shard(stage.index):
            entries[entry] = value
    return entries
