"""Buffers that forwards change, such as running statistics: which microbatches change them, in run and reference.

A run's buffers of a stage are those of one rank, which may do the forwards of some microbatches only. In the reference
the other microbatches leave the buffers unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from mpirun.engine.core.stage import LocalStage
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from mpirun.model.module_tensors import buffer_copies, frozen_statistics
from mpirun.verify.record import Parameters
from mpirun.verify.reference_stage import ReferenceStage
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program


class Statistics(NamedTuple):
    """Facts about the stages whose forwards change buffers.

    seen      by stage, the microbatches of the list that change the model's buffers
    left_out  stages whose buffers are not compared, and why
    """

    seen: Mapping[int, Sequence[int]]
    left_out: Mapping[int, str]

    def of_microbatch(self, stages: Sequence[ReferenceStage], mb: int) -> list[Callable[..., Any]]:
        """The stages to compute microbatch `mb` with; they change no buffers if the run's buffers did not see it."""
        return [
            partial(_frozen, stage) if mb not in self.seen.get(index, (mb,)) else stage
            for index, stage in enumerate(stages)
        ]

    def of(self, stages: Sequence[ReferenceStage]) -> Parameters:
        """Copies of the buffers that are compared."""
        compared = [stage for stage in self.seen if stage not in self.left_out]
        return {(stage, name): x for stage in compared for name, x in buffer_copies(stages[stage].module).items()}


def own_buffers(program: Program, setup: Setup, stages: Mapping[int, LocalStage], rank: int) -> Parameters:
    """Copies of those of the model's buffers that rank `rank` has."""
    return {
        (index, name): x.cpu()
        for index, stage in stages.items()
        if setup.shapes[index].overwrites_buffers and statistics_rank(program.header, index) == rank
        for name, x in buffer_copies(stage.module).items()
    }


def gather_statistics(comm: MPI.Intracomm, program: Program, setup: Setup) -> Statistics:
    """A run's `Statistics`. Collective. `program`: this rank's."""
    own: dict[int, list[int]] = {}
    for i in program.instructions(comm.rank):
        changes = i.op == Op.FWD and setup.shapes[i.stage].overwrites_buffers
        if changes and statistics_rank(program.header, i.stage) == comm.rank:
            own.setdefault(i.stage, []).append(i.mb)
    seen = {stage: order for of_rank in comm.allgather(own) for stage, order in of_rank.items()}
    why = "its microbatches are not computed in order"
    return Statistics(seen, {stage: why for stage, order in seen.items() if order != sorted(order)})


def _frozen(stage: ReferenceStage, *arguments: Any) -> Any:
    with frozen_statistics(stage.module):
        return stage(*arguments)
