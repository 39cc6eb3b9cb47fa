"""The setup of a run: model, data, optimizer and device, all that does not depend on which rank computes what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.device import Device, choose_device
from mpirun.comm.fail_together import bytes_from_rank_0, from_rank_0, on_rank_0, print_notes, together
from mpirun.data.microbatches import Microbatches
from mpirun.data.text import training_text
from mpirun.engine.expand_shards import check_split_stages, expand_model
from mpirun.engine.loss import check_minibatch_loss, try_minibatch_loss
from mpirun.engine.optimizer import Recipe
from mpirun.engine.options import SetupOptions
from mpirun.model.contract import Model
from mpirun.model.dataflow import Dataflow, Reads, check_reads, how_to_compile
from mpirun.model.load_model import load_model
from mpirun.model.shapes import StageShape, infer_shapes
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError, raised


class Setup(NamedTuple):
    """The same on all ranks, except for the device."""

    model: Model  # with the shards of tensor parallelism
    unsharded_model: Model
    shapes: Sequence[StageShape]  # by stage
    dataflows: Sequence[Dataflow]  # by microbatch of a list, the first the largest
    microbatches: Microbatches
    text: Tensor
    seed: int
    recipe: Recipe
    passes: int  # accumulation passes through the list, a step
    canonical: bool
    device: Device
    autocast_dtype: torch.dtype | None  # the type that autocast computes in
    crowded: bool  # there are more ranks on this host than cores


def set_up(comm: MPI.Intracomm, options: SetupOptions, header: Header) -> Setup:
    """The setup for a schedule. Collective; Stop if the model does not fit the schedule or the options."""
    cores = _cores_per_rank(comm)
    torch.set_num_threads(options.threads or max(1, int(cores)))
    device = together(comm, lambda: choose_device(comm, options.device))
    autocast_dtype = torch.bfloat16 if options.autocast else None
    with print_notes(comm):
        unsharded_model = together(comm, lambda: _load_model(options, header))
    model = together(comm, lambda: _expanded_model(unsharded_model, header))
    text = torch.from_numpy(bytes_from_rank_0(comm, lambda: training_text(options.text, model.length)))
    recipe = Recipe(
        options.optimizer, options.lr, options.momentum, options.weight_decay, options.lr_schedule, options.warmup,
        options.steps, options.clip,
    )  # fmt: skip
    microbatches = Microbatches(model.batch, text, options.seed, header.microbatches * options.accumulate)
    reads = together(comm, lambda: _reads(model, header, microbatches))
    shapes_by_size = from_rank_0(comm, lambda: _shapes(model, reads, microbatches, options.accumulate, autocast_dtype))
    distinct = [Dataflow(reads, header, [shape.outputs for shape in shapes]) for shapes in shapes_by_size]
    dataflows = [distinct[size] for size in _sizes(microbatches)[1][: header.microbatches]]
    if model.loss_of == "minibatch":
        on_rank_0(comm, lambda: try_minibatch_loss(model, microbatches, dataflows, autocast_dtype))
    return Setup(
        model, unsharded_model, shapes_by_size[0], dataflows, microbatches, text, options.seed, recipe,
        options.accumulate, options.canonical, device, autocast_dtype, cores < 1,
    )  # fmt: skip


def _load_model(options: SetupOptions, header: Header) -> Model:
    if header.weight_versions:
        refused = {"--clip": options.clip is not None, "--accumulate": options.accumulate > 1}
        for option in [option for option, used in refused.items() if used]:
            raise UsageError(f"{option} needs the whole gradient, and this schedule updates stages one by one")
        if options.on_nan == "skip":
            raise UsageError("--on-nan skip: this schedule has updated stages before all losses are known")
    stages, layers = header.stages // header.tensor_parallel.degree, header.scheme.get("layers")
    model = load_model(options.model, stages, options.seed, layers)
    check_split_stages(model, header)
    if model.loss_of == "minibatch":
        check_minibatch_loss(header, options.accumulate)
    return model


def _expanded_model(unsharded_model: Model, header: Header) -> Model:
    """The model with shards; UsageError if it ties stages that the schedule does not."""
    model = expand_model(unsharded_model, header.tensor_parallel.degree)
    for tie in model.tied:
        stages = tuple(sorted({stage for stage, _ in tie}))
        if len(stages) > 1 and stages not in header.tied:
            if model.ties_shards(tie):
                raise UsageError(f"the schedule does not tie stages {stages}, shards of one: compile it again")
            wanted = ",".join(str(stage // header.tensor_parallel.degree) for stage in stages)
            raise UsageError(f"the model ties parameters of stages {wanted}: {how_to_compile(header)}")
    return model


def _reads(model: Model, header: Header, microbatches: Microbatches) -> Reads:
    """What each stage reads, checked against the schedule."""
    try:
        leaves = len(microbatches(0, 0).leaves)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"the model's batch fails: {raised(error)}") from None
    reads = model.resolved_reads(header.graph.producers, leaves)
    check_reads(reads, header)
    return reads


def _sizes(microbatches: Microbatches) -> tuple[list[int], list[int]]:
    """The first microbatch of each size that there is, and for every microbatch the number of its size."""
    shapes = microbatches.input_shapes
    firsts = [number for number, shape in enumerate(shapes) if shape not in shapes[:number]]
    return firsts, [next(k for k, first in enumerate(firsts) if shapes[first] == shape) for shape in shapes]


def _shapes(
    model: Model, reads: Reads, microbatches: Microbatches, passes: int, autocast_dtype: torch.dtype | None
) -> list[list[StageShape]]:
    """For each size of microbatch, the shapes of all stages."""
    firsts, _ = _sizes(microbatches)
    if len(firsts) > 1 and passes > 1:
        raise UsageError("--accumulate: the minibatch cannot be cut into microbatches of one size")
    return [infer_shapes(model, reads, microbatches(0, number), autocast_dtype) for number in firsts]


def _cores_per_rank(comm: MPI.Intracomm) -> float:
    """A rank's share of its host's cores."""
    same_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = same_host.size
    same_host.Free()
    return len(os.sched_getaffinity(0)) / ranks
