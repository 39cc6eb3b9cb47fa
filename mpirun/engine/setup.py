"""The setup of a run: model, data, optimizer and device; all that does not depend on which rank computes what."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.device import Device, choose_device, ranks_on_host
from mpirun.comm.fail_together import bytes_from_rank_0, from_rank_0, on_rank_0, print_notes, raised_at, together
from mpirun.comm.waiting import sleeping_barrier
from mpirun.data.microbatches import Microbatch, Microbatches, MicrobatchSource
from mpirun.data.text import training_text
from mpirun.engine.expand_shards import check_shards, expanded_model
from mpirun.engine.loss import check_minibatch_loss, try_minibatch_loss
from mpirun.engine.options import SetupOptions
from mpirun.engine.recipe import Recipe, command_line_recipe
from mpirun.engine.running_statistics import check_shared_buffers
from mpirun.model.contract import Model
from mpirun.model.dataflow import Dataflow, Reads, all_outputs, check_reads
from mpirun.model.load_model import load_model
from mpirun.model.shapes import Trial, infer_shapes
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError, raised


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a rank uses of its host."""

    device: Device
    crowded: bool  # there are more ranks on this host than cores


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a run's steps do, whatever the model, the data and the schedule are."""

    recipe: Recipe
    seed: int = 0
    passes: int = 1  # accumulation passes through the list, per step
    canonical: bool = False
    autocast_dtype: torch.dtype | None = None  # the type that autocast computes in
    on_nan: str = "stop"  # or "skip"
    graphs: bool = False  # jobs are captured and replayed


@dataclass(frozen=True, kw_only=True)
class Setup(StepOptions, Host):
    """The same on all ranks, except for the device and whether the host is crowded."""

    model: Model  # with the shards of tensor parallelism
    unsharded_model: Model
    shapes: Sequence[StageShape]  # by stage
    dataflows: Sequence[Dataflow]  # by microbatch of a list; the first is the largest
    microbatches: MicrobatchSource
    text: Tensor | None  # what the command line's microbatches are made from


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
    unsharded_model: Model,
    source: MicrobatchSource,
    options: StepOptions,
    host: Host,
    text: Tensor | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> Setup:
    """The setup for a schedule. Collective; Stop if the model does not fit the schedule or the options.

    `unsharded_model`: as its author gave it; `text`: what `source` makes microbatches from, if any; `prepare`: as for
    `infer_shapes`.
    """
    if options.canonical:  # before the loss is tried on the device
        host.device.be_deterministic()
    together(comm, lambda: _check_options(unsharded_model, options, header, host.device))
    model = together(comm, lambda: expanded_model(unsharded_model, header))
    reads = together(comm, lambda: _reads(model, header, source))
    autocast_dtype = options.autocast_dtype
    device = host.device.torch
    shapes_by_size = from_rank_0(
        comm, lambda: _shapes(model, reads, source, options.passes, autocast_dtype, device, prepare)
    )
    together(comm, lambda: check_shared_buffers(unsharded_model, shapes_by_size[0]))
    counts = [len(shape.outputs) for shape in shapes_by_size[0]]
    outputs_read = reads if model.reads is not None else [all_outputs(sources, counts) for sources in reads]
    distinct = [Dataflow(outputs_read, header, [shape.outputs for shape in shapes]) for shapes in shapes_by_size]
    dataflows = [distinct[size] for size in _sizes(source)[1][: header.microbatches]]
    if model.loss_of == "minibatch":

        def real(batch: Microbatch) -> Sequence[Tensor]:
            return Trial(model, reads, batch, autocast_dtype, device, prepare).last_outputs()

        on_rank_0(comm, lambda: try_minibatch_loss(model, source, dataflows, autocast_dtype, device, real))
    return Setup(
        **vars(options), **vars(host), model=model, unsharded_model=unsharded_model, shapes=shapes_by_size[0],
        dataflows=dataflows, microbatches=source, text=text,
    )  # fmt: skip


def _check_options(model: Model, options: StepOptions, header: Header, device: Device) -> None:
    if options.graphs and not device.has_graphs:
        raise UsageError("graphs: a CPU launches no kernels that could be captured")
    if not header.has_flush:
        refused = {"clip": options.recipe.clip is not None, "accumulate": options.passes > 1}
        for option in [option for option, used in refused.items() if used]:
            raise UsageError(f"{option} needs the whole gradient, and this schedule updates stages one by one")
        if options.on_nan == "skip":
            raise UsageError("no step can be skipped: this schedule has updated stages before all losses are known")
    check_shards(model, header)
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
    check_reads(reads, header)
    return reads


def _sizes(microbatches: MicrobatchSource) -> tuple[list[int], list[int]]:
    """The first microbatch of each size, and for every microbatch the number of its size."""
    shapes = microbatches.input_shapes
    firsts = [number for number, shape in enumerate(shapes) if shape not in shapes[:number]]
    return firsts, [next(k for k, first in enumerate(firsts) if shapes[first] == shape) for shape in shapes]


def _shapes(
    model: Model,
    reads: Reads,
    microbatches: MicrobatchSource,
    passes: int,
    autocast_dtype: torch.dtype | None,
    device: torch.device,
    prepare: Callable[[nn.Module], object] | None,
) -> list[list[StageShape]]:
    """For each size of microbatch, the shapes of all stages."""
    firsts, _ = _sizes(microbatches)
    if len(firsts) > 1 and passes > 1:
        raise UsageError("accumulate: the minibatch cannot be cut into microbatches of one size")
    examples = microbatches.examples()
    return [infer_shapes(model, reads, examples[number], autocast_dtype, device, prepare) for number in firsts]


_threads_before: list[int] = []  # one for each run that has not ended, the first run's first


def threads_kept() -> Callable[[], None]:
    """A function that resets torch's threads to their present number, once no other run of this process goes on."""
    _threads_before.append(torch.get_num_threads())

    def give_back() -> None:
        before = _threads_before.pop()
        if not _threads_before:
            torch.set_num_threads(before)

    return give_back


def use_host(comm: MPI.Intracomm, device: str, threads: int, gpu_messages: str, stream_words: bool) -> Host:
    """Choose this rank's device, by name, and the number of torch's threads; 0: its share of the cores. Collective.

    `gpu_messages`: auto, direct or host; `stream_words`: words in memory replace events.
    """
    sleeping_barrier(comm)  # some ranks may still be importing
    own = os.sched_getaffinity(0)  # a part of the host's, where launchers bind ranks to cores
    of_ranks = comm.allgather(own)
    ranks = Counter(core for rank in ranks_on_host(comm) for core in of_ranks[rank])
    cores = sum(Fraction(1, ranks[core]) for core in own)
    torch.set_num_threads(threads or max(1, int(cores)))
    chosen = together(comm, lambda: choose_device(comm, device, gpu_messages, stream_words))
    return Host(device=chosen, crowded=cores < 1)
