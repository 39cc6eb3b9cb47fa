"""Tensor parallelism: expands a model to T slices of every stage, as in a schedule compiled with --tensor T.

Stage s T + t of the expanded model is slice t of stage s. A stage in `Model.sliced` gets T different slices, each with
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
from mpirun.model.dataflow import Value, how_to_compile
from mpirun.model.module_tensors import own_tensors
from mpirun.model.parallel_layers import Slice, sliced_dims
from mpirun.model.stage_copies import fake_mode, stage_without_values
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


def _check_slices(model: Model, header: Header) -> None:
    """UsageError if a schedule gives slices to other stages than the model, or cannot compute the model's loss."""
    if not header.tensor_parallel:
        return
    replicated = [stage for stage in range(len(model.stages)) if stage not in model.sliced]
    if list(header.tensor_parallel.replicated) != replicated:
        if not model.sliced:
            degree = header.tensor_parallel.degree
            raise UsageError(
                f"the schedule was compiled with --tensor {degree}, but no stage of this model defines slices: "
                "give Model(sliced=...)"
            )
        in_model, in_schedule = (
            ",".join(map(str, stages)) for stages in (replicated, header.tensor_parallel.replicated)
        )
        raise UsageError(
            f"the model is replicated in stages {in_model}, the schedule in {in_schedule}: {how_to_compile(header)}"
        )
    if model.loss_of == "minibatch":
        raise UsageError("the model's loss is of the whole minibatch, and the schedule has slices of stages")


def expanded_model(unsliced_model: Model, header: Header) -> Model:
    """The model with the schedule's slices; UsageError if it has others, or a schedule with backwards lacks ties."""
    _check_slices(unsliced_model, header)
    model = expand_model(unsliced_model, header.tensor_parallel.degree)
    for tie in model.tied:
        stages = tuple(sorted({stage for stage, _ in tie}))
        if len(stages) > 1 and stages not in header.tied and not header.is_forward:
            if model.ties_slices(tie):
                raise UsageError(f"the schedule does not tie stages {stages}, slices of one stage: compile it again")
            wanted = ",".join(str(header.model_stage(stage)) for stage in stages)
            raise UsageError(f"the model ties parameters of stages {wanted}: {how_to_compile(header)}")
    return model


def expand_model(model: Model, count: int) -> Model:
    """The model with `count` slices or replicas of every stage. UsageError if a stage cannot have slices."""
    if count == 1:
        return model
    stages: list[StageEntry] = []
    for stage, entry in enumerate(model.stages):
        stages += _slices(model, stage, entry, count) if stage in model.sliced else [entry] * count
    reads = None
    if model.reads is not None:
        reads = [  # slice t reads the output of slice t, or the same input
            [Value(x.stage * count + t, x.output) if isinstance(x, Value) else x for x in sources]
            for sources in model.reads
            for t in range(count)
        ]
    expanded = model._replace(stages=stages, tied=[], reads=reads, tensor_parallel=count)
    ties = [[(stage * count + t, name) for stage, name in tie] for tie in model.tied for t in range(count)]
    for stage in model.sliced:
        ties += _ties_of_slices(expanded, stage, count)
    return expanded._replace(tied=ties)


def _slices(model: Model, stage: int, entry: StageEntry, count: int) -> list[StageEntry]:
    if isinstance(entry, nn.Module):
        raise UsageError(f"stage {stage} of the model has slices: give a function that builds it, not a module")
    if any(tied_stage == stage for tie in model.tied for tied_stage, _ in tie):
        raise UsageError(f"stage {stage} of the model has slices, but shares parameters with others")
    slices = [Slice(t, count) for t in range(count)]
    if isinstance(entry, Mapping):
        return [{name: partial(build_slice, make, slice) for name, make in entry.items()} for slice in slices]
    return [partial(build_slice, entry, slice) for slice in slices]


def _ties_of_slices(expanded: Model, stage: int, count: int) -> list[list[tuple[int, str]]]:
    """Ties for the parameters that every slice of a stage holds in full."""
    fake = fake_mode()
    with ExitStack() as stack:
        slices = [stack.enter_context(stage_without_values(expanded, stage * count + t, fake)) for t in range(count)]
    names = [{name for name, parameter in slice.named_parameters() if parameter.requires_grad} for slice in slices]
    shared = set.intersection(*names) - set(sliced_dims(slices[0]))
    return [
        [(stage * count + t, name) for t in range(count)] for name, _ in slices[0].named_parameters() if name in shared
    ]


def build_slice(make: Callable[..., nn.Module], slice: Slice) -> nn.Module:
    """One slice of the module that `make` builds: the full module is built, and its weights are cut.

    So the weights do not depend on the number of slices. If `make` takes no `slice`, the result is the full module.
    """
    if "slice" not in inspect.signature(make).parameters:
        return make()
    full = make()
    module = make(slice=slice)
    dims = sliced_dims(module)
    values = own_tensors(full)
    with torch.no_grad():
        for name, tensor in own_tensors(module).items():
            if name in values:
                tensor.copy_(dims[name].share(values[name], slice) if name in dims else values[name])
    return module
