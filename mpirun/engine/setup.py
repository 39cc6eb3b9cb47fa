"""What is trained and how: all that does not depend on who computes what."""

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
from mpirun.engine.expand_shards import check_shards, sharded
from mpirun.engine.loss import check_whole_loss, try_whole_loss
from mpirun.engine.optimizer import Recipe
from mpirun.engine.options import SetupOptions
from mpirun.engine.tied_stages import check_ties
from mpirun.model.contract import Model
from mpirun.model.dataflow import Dataflow, Reads, TensorSpec, check_reads
from mpirun.model.load_model import load_model
from mpirun.model.shapes import StageShape, infer_shapes
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError, raised


class Training(NamedTuple):
    """The same on all ranks, but for the memory it lies in."""

    model: Model
    plain: Model  # the same without shards
    shapes: Sequence[StageShape]  # by stage
    dataflows: Sequence[Dataflow]  # by microbatch of a list, the first the largest
    batches: Microbatches
    text: Tensor
    seed: int
    recipe: Recipe
    walks: int  # through the list, a step
    canonical: bool
    device: Device
    mixed: torch.dtype | None  # the type that autocast computes in
    crowded: bool  # there are more ranks here than cores


def training(comm: MPI.Intracomm, options: SetupOptions, header: Header) -> Training:
    """From the options. Collective."""
    cores = _cores(comm)
    torch.set_num_threads(options.threads or max(1, int(cores)))
    where = together(comm, lambda: choose_device(comm, options.device))
    mixed = torch.bfloat16 if options.autocast else None
    with print_notes(comm):
        plain = together(comm, lambda: _model(options, header))
    model = together(comm, lambda: _sharded(plain, header))
    text = torch.from_numpy(bytes_from_rank_0(comm, lambda: training_text(options.text, model.length)))
    recipe = Recipe(
        options.optimizer, options.lr, options.momentum, options.weight_decay, options.lr_schedule, options.warmup,
        options.steps, options.clip,
    )  # fmt: skip
    batches = Microbatches(model.batch, text, options.seed, header.microbatches * options.accumulate)
    reads = together(comm, lambda: _reads(model, header, batches))
    shapes, others = from_rank_0(comm, lambda: _shapes(model, reads, batches, options.accumulate, mixed))
    distinct = [Dataflow(reads, header, outputs) for outputs in others]
    dataflows = [distinct[number] for number in _kinds(batches)[1][: header.microbatches]]
    if model.loss_of == "minibatch":
        on_rank_0(comm, lambda: try_whole_loss(model, batches, dataflows, mixed))
    return Training(
        model, plain, shapes, dataflows, batches, text, options.seed, recipe, options.accumulate, options.canonical,
        where, mixed, cores < 1,
    )  # fmt: skip


def _model(options: SetupOptions, header: Header) -> Model:
    if header.weight_versions.count:
        wrong = {"--clip": options.clip is not None, "--accumulate": options.accumulate > 1}
        for option in [option for option, given in wrong.items() if given]:
            raise UsageError(f"{option} needs the whole gradient, and this schedule updates stages one by one")
        if options.on_nan == "skip":
            raise UsageError("--on-nan skip: this schedule has updated stages before all losses are known")
    stages, layers = header.stages // header.tensor_parallel.degree, header.scheme.get("layers")
    model = load_model(options.model, stages, options.seed, layers)
    check_shards(model, header)
    if model.loss_of == "minibatch":
        check_whole_loss(header, options.accumulate)
    return model


def _sharded(plain: Model, header: Header) -> Model:
    model = sharded(plain, header.tensor_parallel.degree)
    check_ties(model, header)
    return model


def _reads(model: Model, header: Header, batches: Microbatches) -> Reads:
    try:
        leaves = len(batches(0, 0).leaves)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"the model's batch fails: {raised(error)}") from None
    reads = model.resolved_reads(header.graph.producers, leaves)
    check_reads(reads, header)
    return reads


def _kinds(batches: Microbatches) -> tuple[list[int], list[int]]:
    """A microbatch of each size that there is, and the place of each one's in that list."""
    sizes = batches.input_shapes
    firsts = [number for number, size in enumerate(sizes) if size not in sizes[:number]]
    return firsts, [next(k for k, first in enumerate(firsts) if sizes[first] == size) for size in sizes]


def _shapes(
    model: Model, reads: Reads, batches: Microbatches, walks: int, mixed: torch.dtype | None
) -> tuple[list[StageShape], list[list[tuple[TensorSpec, ...]]]]:
    """Those of the first microbatch, and for each size of microbatch the outputs by stage."""
    firsts, _ = _kinds(batches)
    if len(firsts) > 1 and walks > 1:
        raise UsageError("--accumulate: the minibatch cannot be cut into microbatches of one size")
    found = [infer_shapes(model, reads, batches(0, number), mixed) for number in firsts]
    return found[0], [[shape.outputs for shape in one] for one in found]


def _cores(comm: MPI.Intracomm) -> float:
    """A rank's share of its host's cores."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = here.size
    here.Free()
    return len(os.sched_getaffinity(0)) / ranks
