"""Notes to the user on a run, which continues: one line each, printed by rank 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.output import note
from mpirun.data.loader import Batch
from mpirun.data.values import by_path
from mpirun.engine.job_graphs import JobGraphs
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from schedgen.ir.header import Header
from schedgen.ir.instructions import F
from schedgen.util.errors import listed


def note_state(comm: MPI.Intracomm, setup: Setup, header: Header, microbatches: int) -> None:
    """Name the buffers that go from one microbatch of a step to the next, and whose values evaluations use."""
    changed = dict.fromkeys(
        f"{n} of stage {shape.model_stage}" for shape in setup.shapes for n in shape.changed_buffers
    )
    if not changed or microbatches == 1:
        return
    stages = [s for s, shape in enumerate(setup.shapes) if shape.changed_buffers]
    ranks = {statistics_rank(header, s) for s in stages if len({*header.compute[F, s].tolist()}) > 1}
    whose = f"; evaluation uses those of rank {listed([*map(str, sorted(ranks))])}" if ranks else ""
    note(
        comm,
        f"forwards change buffers from microbatch to microbatch, as BatchNorm does: {listed(changed)}: outputs may "
        f"differ from the whole batch at once{whose}",
    )


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


def note_left_out(comm: MPI.Intracomm, names: Collection[str]) -> None:
    """Name the parameters that no optimizer has; `names`: those of this rank. Collective."""
    if left_out := sorted(set().union(*comm.allgather(names))):
        note(comm, f"the optimizer leaves out {listed(left_out)}: this Engine does not train them")


def note_uncaptured(comm: MPI.Intracomm, graphs: JobGraphs | None) -> None:
    """Name, once and as soon as it is known, the stages that are not captured as graphs, and why. Collective."""
    if graphs is None or graphs.told or not graphs.looked:
        return
    graphs.told = True
    lines = comm.gather(graphs.refusals()) or ()
    for line in sorted({line for of_rank in lines for line in of_rank}):
        note(comm, line)
