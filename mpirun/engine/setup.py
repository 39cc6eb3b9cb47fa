"""The setup of a run: device, threads, model, data, optimizer; all that does not depend on which rank computes what."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from mpi4py import MPI
from torch import nn

from mpirun.comm.device import Device, choose_device, ranks_on_host
from mpirun.comm.fail_together import from_rank_0, together
from mpirun.comm.waiting import check_launcher, sleeping_barrier
from mpirun.data.microbatches import Microbatch, Microbatches, MicrobatchSource, training_text
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.expand_slices import expanded_model
from mpirun.engine.loss import check_minibatch_loss
from mpirun.engine.options import HostOptions, RunOptions, SetupOptions
from mpirun.engine.recipe import Recipe
from mpirun.model.contract import Model
from mpirun.model.dataflow import Dataflow, all_outputs, check_graph
from mpirun.model.stage_shape import StageShape
from mpirun.model.trial import Trial
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a rank uses of its host."""

    device: Device
    crowded: bool  # there are more ranks on this host than cores


@dataclass(frozen=True, kw_only=True)
class Setup(Host):
    """The setup of a run, the same on all ranks except for the device and whether the host is crowded."""

    recipe: Recipe
    seed: int
    canonical: bool
    autocast_dtype: torch.dtype | None  # the type that autocast computes in
    graphs: bool
    model: Model  # with the slices of tensor parallelism
    unsliced_model: Model
    shapes: Sequence[StageShape]  # by stage
    dataflow: Dataflow
    microbatches: MicrobatchSource
    example: Microbatch  # as all that an interpreter of this setup reads


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a run, for what reads or writes all of the model: checkpoints, exports, statistics."""

    comm: MPI.Intracomm
    header: Header
    setup: Setup
    stages: Mapping[int, LocalStage]
    beat: Callable[[], None]  # is called after each piece of work


def use_host(comm: MPI.Intracomm, options: HostOptions) -> Host:
    """Choose this rank's device, and torch's threads; by default the rank's share of the cores. Collective."""
    together(comm, check_launcher)
    sleeping_barrier(comm)  # some ranks may still be importing
    own = os.sched_getaffinity(0)  # launchers may bind a rank to some of the host's cores
    of_ranks = comm.allgather(own)
    ranks = Counter(core for rank in ranks_on_host(comm) for core in of_ranks[rank])
    cores = sum(Fraction(1, ranks[core]) for core in own)
    torch.set_num_threads(options.threads or max(1, int(cores)))
    device = together(comm, lambda: choose_device(comm, options.device, options.gpu_messages, options.stream_words))
    return Host(device=device, crowded=cores < 1)


def text_microbatches(comm: MPI.Intracomm, model: Model, options: SetupOptions, count: int) -> Microbatches:
    """The microbatches that a model makes itself, `count` a step, from the text that rank 0 reads. Collective."""
    text = bytearray(from_rank_0(comm, lambda: training_text(options.text, model.length)))
    assert model.batch is not None
    tokens = torch.frombuffer(text, dtype=torch.uint8)
    return Microbatches(model.batch, tokens, options.seed, count)


def set_up(
    comm: MPI.Intracomm,
    header: Header,
    unsliced_model: Model,
    source: MicrobatchSource,
    options: RunOptions,
    recipe: Recipe,
    host: Host,
    prepare: Callable[[int, nn.Module], object] | None = None,
) -> Setup:
    """The setup for a schedule. Collective; Stop if the model does not fit the schedule or the options.

    `unsliced_model`: as its author gave it; `prepare`: as for `Trial`.
    """
    if options.canonical:  # before the loss is tried on the device
        host.device.be_deterministic()
    together(comm, lambda: _check_options(unsliced_model, options, recipe, header, host.device))
    model = together(comm, lambda: expanded_model(unsliced_model, header))
    reads = model.resolved_reads(header.graph.producers, len(source.example.leaves))
    together(comm, lambda: check_graph(reads, header))
    dtype, device = torch.bfloat16 if options.autocast else None, host.device.torch
    shapes = from_rank_0(comm, lambda: Trial(model, reads, source.example, dtype, device, prepare).shapes())
    counts = [len(shape.outputs) for shape in shapes]
    outputs_read = reads if model.reads is not None else [all_outputs(sources, counts) for sources in reads]
    dataflow = Dataflow(outputs_read, header, [shape.outputs for shape in shapes])
    return Setup(
        **vars(host), recipe=recipe, seed=options.seed, canonical=options.canonical,
        autocast_dtype=dtype, graphs=options.graphs, model=model,
        unsliced_model=unsliced_model, shapes=shapes, dataflow=dataflow, microbatches=source, example=source.example,
    )  # fmt: skip


def _check_options(model: Model, options: RunOptions, recipe: Recipe, header: Header, device: Device) -> None:
    if options.graphs and not device.has_graphs:
        raise UsageError("graphs: a CPU launches no kernels that could be captured")
    if not header.has_flush and recipe.clip is not None:
        raise UsageError("clip needs the whole gradient, and this schedule updates stages one by one")
    if model.loss_of == "minibatch":
        check_minibatch_loss(header)
