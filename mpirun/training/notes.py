"""Notes to the user on a run, which continues: one line each, printed by rank 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.output import note
from mpirun.data.loader import Batch
from mpirun.data.values import by_path
from mpirun.engine.job_graphs import JobGraphs
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from mpirun.model.module_tensors import given_modules
from schedgen.ir.header import Header
from schedgen.ir.instructions import F
from schedgen.util.errors import listed


def note_state(comm: MPI.Intracomm, setup: Setup, header: Header, microbatches: int) -> None:
    """Name what goes from one microbatch of a step to the next, and so makes other outputs than the whole batch."""
    state = [f"{name} of stage {shape.model_stage}" for shape in setup.shapes for name in shape.state]
    if state and microbatches > 1:
        note(
            comm,
            f"buffer {listed(dict.fromkeys(state))} changes from microbatch to microbatch: outputs that depend on it "
            "may differ from the whole batch at once",
        )
    normed = [s for s, shape in enumerate(setup.shapes) if len(shape.state) < len(shape.changed_buffers)]
    if ranks := {statistics_rank(header, s) for s in normed if len({*header.compute[F, s].tolist()}) > 1}:
        those = listed([*map(str, sorted(ranks))])
        note(comm, f"BatchNorm: evaluation uses the statistics of rank {those}'s microbatches")
    entries = [module for entry in setup.unsliced_model.stages for _, module in given_modules(entry)]
    if any(isinstance(part, nn.SyncBatchNorm) for module in entries for part in module.modules()):
        note(comm, "SyncBatchNorm is BatchNorm here: its statistics are those of a microbatch")


def note_ignored_labels(comm: MPI.Intracomm, batch: Batch) -> None:
    """Say that targets have labels that torch's cross_entropy ignores, if they do. Collective."""
    leaves = [
        leaf
        for microbatch in batch.microbatches.values()
        for path, leaf in by_path(microbatch.target).items()
        if not isinstance(microbatch.target, Mapping) or "label" in path  # a mapping has the input, too
    ]
    own = any(isinstance(x, Tensor) and x.dtype == torch.int64 and bool((x == -100).any()) for x in leaves)
    if any(comm.allgather(own)):
        note(
            comm,
            "targets have labels of -100, which cross_entropy ignores: microbatches count by their samples, not by "
            "their other labels, unless loss_weight counts these",
        )


def note_unreached(comm: MPI.Intracomm, setup: Setup, reached: Collection[tuple[int, str]], step: int) -> None:
    """Name the parameters that got no gradient in step `step`, from 0. Collective.

    `reached`: (stage, parameter) of those that got one on this rank.
    """
    model = setup.model
    of_ranks = comm.gather({model.entry_name(*parameter) for parameter in reached})
    if of_ranks is None:
        return
    trained = {model.entry_name(s, name) for s, shape in enumerate(setup.shapes) for name in shape.parameter_names}
    if unreached := sorted(trained.difference(*of_ranks)):
        note(
            comm,
            f"step {step + 1} gives no gradient to {listed(unreached)}: it counts as 0, so that weight decay and "
            "momentum change them, where torch would not; freeze what is never used (requires_grad_(False))",
        )


def note_left_out(comm: MPI.Intracomm, names: Collection[str]) -> list[str]:
    """Name the parameters that no optimizer has, and return them; `names`: those of this rank. Collective."""
    if left_out := sorted(set().union(*comm.allgather(names))):
        note(comm, f"the optimizer leaves out {listed(left_out)}: this Engine does not train them")
    return left_out


def note_uncaptured(comm: MPI.Intracomm, graphs: JobGraphs | None) -> None:
    """Name, once and as soon as it is known, the stages that are not captured as graphs, and why. Collective."""
    if graphs is None or graphs.told or not graphs.looked:
        return
    graphs.told = True
    lines = comm.gather(graphs.refusals()) or ()
    for line in sorted({line for of_rank in lines for line in of_rank}):
        note(comm, line)
