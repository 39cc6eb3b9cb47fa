"""Buffers that forwards change, such as running statistics: which microbatches change them, in run and reference.

A run's buffers of a stage are those of one rank, which may do the forwards of some microbatches only. In the reference
the other microbatches leave the buffers unchanged. The reference takes the microbatches of a pass in an order that has
those of each such stage as the run's list has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import nn

from mpirun.engine.core.stage import LocalStage
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from mpirun.model.frozen_statistics import buffer_copies, frozen_statistics, set_buffers
from mpirun.verify.record import Parameters
from mpirun.verify.reference_stage import ReferenceStage
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program


class Statistics(NamedTuple):
    """Facts about the stages whose forwards change buffers.

    seen      by stage, the microbatches of the list that change the model's buffers
    resumed   the buffers that a run read from a checkpoint; empty: it began with its own
    names     the buffers, by stage
    left_out  stages whose buffers are not compared, and why
    order     the microbatches of a pass in the reference's order
    """

    seen: Mapping[int, Sequence[int]]
    resumed: Parameters
    names: Mapping[int, Sequence[str]]
    left_out: Mapping[int, str]
    order: Sequence[int]

    def of_microbatch(self, stages: Sequence[ReferenceStage], mb: int) -> list[Callable[..., Any]]:
        """The stages to compute microbatch `mb` with; they change no buffers if the run's buffers did not see it."""
        return [
            partial(_frozen, stage) if mb not in self.seen.get(index, (mb,)) else stage
            for index, stage in enumerate(stages)
        ]

    def of(self, modules: Sequence[nn.Module]) -> Parameters:
        """Copies of the modules' buffers that are compared."""
        compared = [stage for stage in self.seen if stage not in self.left_out]
        return {(stage, name): x for stage in compared for name, x in buffer_copies(modules[stage]).items()}

    def put(self, buffers: Parameters, modules: Sequence[nn.Module]) -> None:
        """Set the modules' buffers to `buffers`."""
        for stage in self.seen:
            set_buffers(modules[stage], {name: x for (of, name), x in buffers.items() if of == stage})


def own_buffers(program: Program, setup: Setup, stages: Mapping[int, LocalStage], rank: int) -> Parameters:
    """Copies of those of the model's buffers that rank `rank` has."""
    return {
        (index, name): x.cpu()
        for index, stage in stages.items()
        if setup.shapes[index].overwrites_buffers and statistics_rank(program.header, index) == rank
        for name, x in buffer_copies(stage.module).items()
    }


def gather_statistics(
    comm: MPI.Intracomm, program: Program, setup: Setup, buffers: Parameters, resumed: Parameters
) -> Statistics:
    """A run's `Statistics`. Collective. `program`: this rank's; `buffers`: `own_buffers`; `resumed`: on resume."""
    seen: dict[int, list[int]] = {}
    for i in program.instructions(comm.rank):
        changes = i.op == Op.FWD and setup.shapes[i.stage].overwrites_buffers
        if changes and statistics_rank(program.header, i.stage) == comm.rank:
            seen.setdefault(i.stage, []).append(i.mb)
    own_names = {stage: [name for of, name in buffers if of == stage] for stage in seen}
    all_seen, all_resumed, names = map(_merged, zip(*comm.allgather((seen, resumed, own_names)), strict=True))
    ascending, why = range(program.header.microbatches), "its microbatches are not computed in order"
    left_out = {stage: why for stage, order in all_seen.items() if order != sorted(order)}
    order = _common_order(ascending, all_seen.values()) if left_out and program.header.has_flush else None
    return Statistics(all_seen, all_resumed, names, {} if order else left_out, order or ascending)


def _common_order(microbatches: Iterable[int], orders: Iterable[Sequence[int]]) -> Sequence[int] | None:
    """The microbatches in an order that agrees with all of these; None: they contradict each other."""
    sorter = TopologicalSorter[int](dict.fromkeys(microbatches, ()))
    for before, after in (pair for order in orders for pair in pairwise(order)):
        sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except CycleError:
        return None


def _merged(of_ranks: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    return {key: value for of_rank in of_ranks for key, value in of_rank.items()}


def _frozen(stage: ReferenceStage, *arguments: Any) -> Any:
    with frozen_statistics(stage.module):
        return stage(*arguments)
