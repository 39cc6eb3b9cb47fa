"""The setup of a run: model, data, optimizer and device; all that does not depend on which rank computes what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.device import Device
from mpirun.comm.fail_together import bytes_from_rank_0, from_rank_0, raised_at, together
from mpirun.comm.output import print_notes
from mpirun.data.microbatches import Microbatch, Microbatches, MicrobatchSource, Shape
from mpirun.data.text import training_text
from mpirun.engine.expand_slices import check_slices, expanded_model
from mpirun.engine.host import Host, use_host
from mpirun.engine.loss import check_minibatch_loss
from mpirun.engine.options import SetupOptions
from mpirun.engine.recipe import Recipe, command_line_recipe
from mpirun.engine.running_statistics import check_shared_buffers
from mpirun.model.contract import Model
from mpirun.model.dataflow import Dataflow, Reads, TensorSpec, all_outputs, check_graph
from mpirun.model.load_model import load_model
from mpirun.model.stage_shape import StageShape
from mpirun.model.trial import Trial
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError, raised


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a run's steps that depend on neither the model nor the data nor the schedule."""

    recipe: Recipe
    seed: int = 0
    passes: int = 1  # accumulation passes through the list, per step
    canonical: bool = False
    autocast_dtype: torch.dtype | None = None  # the type that autocast computes in
    on_nan: str = "stop"  # or "skip"
    graphs: bool = False  # jobs are captured and replayed


@dataclass(frozen=True, kw_only=True)
class Setup(StepOptions, Host):
    """The setup of a run, the same on all ranks except for the device and whether the host is crowded."""

    model: Model  # with the slices of tensor parallelism
    unsliced_model: Model
    shapes: Sequence[StageShape]  # by stage
    dataflows: Sequence[Dataflow]  # by microbatch of a list; the first is the largest
    microbatches: MicrobatchSource
    text: Tensor | None  # what the command line's microbatches are made from
    outputs_of_one_more: Callable[[], Sequence[TensorSpec] | None]  # as Trial's, for the first example. Collective


def set_up_command(comm: MPI.Intracomm, options: SetupOptions, header: Header) -> Setup:
    """The setup of a command: its named model makes microbatches from a text. Collective; Stop as in `set_up`."""
    host = use_host(comm, options.device, options.threads, options.gpu_messages, options.stream_words)
    layers = header.scheme.get("layers")
    with print_notes(comm):
        model = together(comm, lambda: load_model(options.model, header.model_stages, options.seed, layers))
    text = torch.from_numpy(bytes_from_rank_0(comm, lambda: training_text(options.text, model.length)))
    assert model.batch is not None  # else load_model has refused the model
    source = Microbatches(model.batch, text, options.seed, header.microbatches * options.accumulate)
    steps = StepOptions(
        recipe=command_line_recipe(options), seed=options.seed, passes=options.accumulate, canonical=options.canonical,
        autocast_dtype=torch.bfloat16 if options.autocast else None, on_nan=options.on_nan, graphs=options.graphs,
    )  # fmt: skip
    return set_up(comm, header, model, source, steps, host, text)


def set_up(
    comm: MPI.Intracomm,
    header: Header,
    unsliced_model: Model,
    source: MicrobatchSource,
    options: StepOptions,
    host: Host,
    text: Tensor | None = None,
    prepare: Callable[[int, nn.Module], object] | None = None,
) -> Setup:
    """The setup for a schedule. Collective; Stop if the model does not fit the schedule or the options.

    `unsliced_model`: as its author gave it; `text`: what `source` makes microbatches from, if any; `prepare`: as for
    `Trial`.
    """
    if options.canonical:  # before the loss is tried on the device
        host.device.be_deterministic()
    together(comm, lambda: _check_options(unsliced_model, options, header, host.device))
    model = together(comm, lambda: expanded_model(unsliced_model, header))
    reads = together(comm, lambda: _reads(model, header, source))
    dtype, device = options.autocast_dtype, host.device.torch
    trial = partial(Trial, model, reads, autocast_dtype=dtype, device=device, prepare=prepare)
    shapes_by_size = from_rank_0(
        comm, lambda: [trial(batch).shapes() for batch in _one_of_each_size(source, options.passes)]
    )
    together(comm, lambda: check_shared_buffers(unsliced_model, shapes_by_size[0]))
    counts = [len(shape.outputs) for shape in shapes_by_size[0]]
    outputs_read = reads if model.reads is not None else [all_outputs(sources, counts) for sources in reads]
    distinct = [Dataflow(outputs_read, header, [shape.outputs for shape in shapes]) for shapes in shapes_by_size]
    dataflow_of = dict(zip(dict.fromkeys(source.input_shapes), distinct, strict=False))
    dataflows = [dataflow_of[shape] for shape in source.input_shapes[: header.microbatches]]
    return Setup(
        **vars(options), **vars(host), model=model, unsliced_model=unsliced_model, shapes=shapes_by_size[0],
        dataflows=dataflows, microbatches=source, text=text,
        outputs_of_one_more=cache(lambda: from_rank_0(comm, trial(source.examples()[0]).outputs_of_one_more)),
    )  # fmt: skip


def _check_options(model: Model, options: StepOptions, header: Header, device: Device) -> None:
    if options.graphs and not device.has_graphs:
        raise UsageError("graphs: a CPU launches no kernels that could be captured")
    if not header.has_flush:
        refused = {"clip": options.recipe.clip is not None, "accumulate": options.passes > 1}
        for option in [option for option, used in refused.items() if used]:
            raise UsageError(f"{option} needs the whole gradient, and this schedule updates stages one by one")
        if options.on_nan == "skip":
            raise UsageError(
                "on_nan skip: this schedule updates stages before all losses are known, so no step can be skipped"
            )
    check_slices(model, header)
    if model.loss_of == "minibatch":
        check_minibatch_loss(header, options.passes)


def _reads(model: Model, header: Header, microbatches: MicrobatchSource) -> Reads:
    """What each stage reads, checked against the schedule."""
    try:
        leaves = len(microbatches.examples()[0].leaves)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"the model's batch fails: {raised(error)}{raised_at(error)}") from None
    reads = model.resolved_reads(header.graph.producers, leaves)
    check_graph(reads, header)
    return reads


def _one_of_each_size(microbatches: MicrobatchSource, passes: int) -> list[Microbatch]:
    """The first microbatch of each size."""
    firsts: dict[Shape, Microbatch] = {}
    for batch in microbatches.examples():
        firsts.setdefault(batch.shape, batch)
    if len(firsts) > 1 and passes > 1:
        raise UsageError("accumulate: the minibatch cannot be cut into microbatches of one size")
    return list(firsts.values())
