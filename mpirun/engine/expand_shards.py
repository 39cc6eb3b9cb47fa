"""Tensor parallelism: expands a model to T shards of every stage, as in a schedule compiled with --tensor T.

Stage s T + t of the expanded model is shard t of stage s. A stage in `Model.sharded` gets T different shards, each with
its share of the weights; any other stage gets T replicas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from mpirun.model.contract import Model, StageEntry
from mpirun.model.dataflow import Source, Value, how_to_compile
from mpirun.model.module_tensors import own_tensors
from mpirun.model.parallel_layers import Shard, sharded_dims
from mpirun.model.stage_copies import fake_mode, stage_without_values
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


def check_shards(model: Model, header: Header) -> None:
    """UsageError if a schedule gives shards to other stages than the model, or cannot compute the model's loss."""
    if not header.tensor_parallel:
        return
    replicated = [stage for stage in range(len(model.stages)) if stage not in model.sharded]
    if list(header.tensor_parallel.replicated) != replicated:
        if not model.sharded:
            raise UsageError("the schedule has shards, but no stage of the model can have any")
        in_model, in_schedule = (
            ",".join(map(str, stages)) for stages in (replicated, header.tensor_parallel.replicated)
        )
        raise UsageError(
            f"the model is whole in stages {in_model}, the schedule in {in_schedule}: {how_to_compile(header)}"
        )
    if model.loss_of == "minibatch":
        raise UsageError("the model's loss is of the whole minibatch, and the schedule has shards of stages")


def expanded_model(unsharded_model: Model, header: Header) -> Model:
    """The model with shards. UsageError if it ties stages that the schedule, unless forward-only, does not."""
    model = expand_model(unsharded_model, header.tensor_parallel.degree)
    for tie in model.tied:
        stages = tuple(sorted({stage for stage, _ in tie}))
        if len(stages) > 1 and stages not in header.tied and not header.is_forward:
            if model.ties_shards(tie):
                raise UsageError(f"the schedule does not tie stages {stages}, shards of one stage: compile it again")
            wanted = ",".join(str(header.model_stage(stage)) for stage in stages)
            raise UsageError(f"the model ties parameters of stages {wanted}: {how_to_compile(header)}")
    return model


def expand_model(model: Model, count: int) -> Model:
    """The model with `count` shards or replicas of every stage. UsageError if a stage cannot have shards."""
    if count == 1:
        return model
    stages: list[StageEntry] = []
    for stage, entry in enumerate(model.stages):
        stages += _shards(model, stage, entry, count) if stage in model.sharded else [entry] * count
    reads = None
    if model.reads is not None:
        reads = [[_of_shard(source, t, count) for source in sources] for sources in model.reads for t in range(count)]
    expanded = model._replace(stages=stages, tied=[], reads=reads, tensor_parallel=count)
    ties = [[(stage * count + t, name) for stage, name in tie] for tie in model.tied for t in range(count)]
    for stage in model.sharded:
        ties += _ties_of_shards(expanded, stage, count)
    return expanded._replace(tied=ties)


def _shards(model: Model, stage: int, entry: StageEntry, count: int) -> list[StageEntry]:
    """The entries that build the shards of a stage."""
    if isinstance(entry, nn.Module):
        raise UsageError(f"stage {stage} of the model has shards: give a function that builds it, not a module")
    if any(tied_stage == stage for tie in model.tied for tied_stage, _ in tie):
        raise UsageError(f"stage {stage} of the model has shards, but shares parameters with others")
    shards = [Shard(t, count) for t in range(count)]
    if isinstance(entry, Mapping):
        return [{name: partial(build_shard, make, shard) for name, make in entry.items()} for shard in shards]
    return [partial(build_shard, entry, shard) for shard in shards]


def _of_shard(source: Source, t: int, count: int) -> Source:
    """The source that shard t reads in place of `source`: the output of shard t of that stage, or the same input."""
    return source._replace(stage=source.stage * count + t) if isinstance(source, Value) else source


def _ties_of_shards(expanded: Model, stage: int, count: int) -> list[list[tuple[int, str]]]:
    """Ties for the parameters that every shard of a stage holds in full."""
    fake = fake_mode()
    with ExitStack() as stack:
        shards = [stack.enter_context(stage_without_values(expanded, stage * count + t, fake))[0] for t in range(count)]
    names = [{name for name, parameter in shard.named_parameters() if parameter.requires_grad} for shard in shards]
    shared = set.intersection(*names) - set(sharded_dims(shards[0]))
    return [
        [(stage * count + t, name) for t in range(count)] for name, _ in shards[0].named_parameters() if name in shared
    ]


def build_shard(make: Callable[..., nn.Module], shard: Shard) -> nn.Module:
    """One shard of the module that `make` builds: the full module is built, and its weights are cut.

    So the weights do not depend on the number of shards. If `make` takes no `shard`, the result is the full module.
    """
    if "shard" not in inspect.signature(make).parameters:
        return make()
    full = make()
    module = make(shard=shard)
    dims = sharded_dims(module)
    values = own_tensors(full)
    with torch.no_grad():
        for name, tensor in own_tensors(module).items():
            if name in values:
                tensor.copy_(dims[name].share(values[name], shard) if name in dims else values[name])
    return module
