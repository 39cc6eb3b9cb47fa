"""A model whose stages have shards: of each as many as a schedule with --tensor says."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Layers, Model
from mpirun.model.dataflow import Source, Value
from mpirun.model.parallel_layers import Shard, sharded_dims
from mpirun.model.shapes import fake_mode
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


def check_shards(model: Model, header: Header) -> None:
    """UsageError where the schedule splits other stages than the model."""
    if header.tensor_parallel.degree > 1:
        whole = [stage for stage in range(len(model.stages)) if stage not in model.split]
        if list(header.tensor_parallel.replicated) != whole:
            if not model.split:
                raise UsageError("the schedule has shards, but no stage of the model can be split")
            ours, theirs = (",".join(map(str, stages)) for stages in (whole, header.tensor_parallel.replicated))
            wanted = ",".join(map(str, whole[:-1]))
            how = f"with --whole {wanted}" if wanted else "without --whole"
            raise UsageError(f"the model is whole in stages {ours}, the schedule in {theirs}: compile it {how}")


def _of_shard(sources: Sequence[Source], t: int, count: int) -> list[Source]:
    """What shard t of a stage reads: the outputs of shards t."""
    return [one._replace(stage=one.stage * count + t) if isinstance(one, Value) else one for one in sources]


def sharded(model: Model, count: int) -> Model:
    """The model with so many shards of every stage: of one that is not split, as many that are the same."""
    if count == 1:
        return model
    stages: list[Layers | Callable[[], nn.Module] | nn.Module] = []
    ties = [[(stage * count + t, name) for stage, name in tie] for tie in model.tied for t in range(count)]
    for stage, entry in enumerate(model.stages):
        if stage not in model.split:
            stages += [entry] * count
            continue
        if isinstance(entry, nn.Module):
            raise UsageError(f"stage {stage} of the model is split, but it is a module, not what builds one")
        if any(place == stage for tie in model.tied for place, _ in tie):
            raise UsageError(f"stage {stage} of the model is split, but shares parameters with others")
        for t in range(count):
            shard = Shard(t, count)
            if isinstance(entry, Mapping):
                stages.append({name: partial(_shard, make, shard) for name, make in entry.items()})
            else:
                stages.append(partial(_shard, entry, shard))
    reads = None if model.reads is None else [_of_shard(one, t, count) for one in model.reads for t in range(count)]
    many = model._replace(stages=stages, tied=[], reads=reads, tensor_parallel=count)
    for stage in model.split:  # what is not cut is shared by all that have it
        with fake_mode():
            of_shards = [build_stage(many, stage * count + t, 0) for t in range(count)]
        names = [{name for name, one in module.named_parameters() if one.requires_grad} for module in of_shards]
        shared = set.intersection(*names) - set(sharded_dims(of_shards[0]))
        ties += [
            [(stage * count + t, name) for t in range(count)]
            for name, _ in of_shards[0].named_parameters()
            if name in shared
        ]
    return many._replace(tied=ties)


def _shard(make: Callable[..., nn.Module], shard: Shard) -> nn.Module:
    """One shard of what `make` builds: built as a whole, with the weights that it would have so, and then cut."""
    if "shard" not in inspect.signature(make).parameters:
        return make()
    whole = make()
    part = make(shard=shard)
    of_part = sharded_dims(part)
    values = dict(itertools.chain(whole.named_parameters(), whole.named_buffers()))
    with torch.no_grad():
        for name, one in itertools.chain(part.named_parameters(), part.named_buffers()):
            if name in values:
                one.copy_(of_part[name].share(values[name], shard) if name in of_part else values[name])
    return part
