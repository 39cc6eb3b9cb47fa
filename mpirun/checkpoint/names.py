"""The entries of a stage in a checkpoint: by the names in the model, whatever stage or rank has them."""

from __future__ import annotations

from torch import Tensor

from mpirun.checkpoint.shares import share_name
from mpirun.engine.stage import Stage
from mpirun.model.contract import Model, entry_name, shard_of


def own_names(model: Model, stage: Stage) -> list[str | None]:
    """The entries of a stage's parameters; None for one that is written with another stage."""
    firsts = {place: tie[0][0] for tie in model.tied for place in tie}
    shard = shard_of(model, stage.index)
    found: list[str | None] = []
    for name in stage.names:
        entry = entry_name(model, stage.index, name)
        if shard.count > 1 and name in stage.shape.cuts:
            found.append(share_name(entry, shard))
        else:
            found.append(entry if firsts.get((stage.index, name), stage.index) == stage.index else None)
    return found


def rest(model: Model, stage: Stage) -> dict[str, Tensor]:
    """What a stage's module has beside trained parameters: frozen ones and buffers."""
    trained = {parameter.data_ptr() for parameter in stage.module.parameters() if parameter.requires_grad}
    return {
        entry_name(model, stage.index, name): value
        for name, value in stage.module.state_dict().items()
        if name.endswith("_extra_state") or value.data_ptr() not in trained
    }
