"""Tied parameters: stages that share them have a copy each, and step it with the same gradient.

`t.k` is the sum over the stages of tie k of the gradients of what they share,
in the order of the stages; it replaces each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from mpi4py import MPI

from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce
from mpirun.comm.transport import Transport
from mpirun.engine.grad_buffer import Gradient
from mpirun.model.contract import Model
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


def check_ties(model: Model, header: Header) -> None:
    """UsageError where the schedule does not add up what the model ties."""
    for tie in model.tied:
        stages = tuple(sorted({stage for stage, _ in tie}))
        if len(stages) > 1 and stages not in header.tied:
            if model.ties_shards(tie):
                raise UsageError(f"the schedule does not tie stages {stages}, shards of one: compile it again")
            wanted = ",".join(str(stage // header.tensor_parallel.degree) for stage in stages)
            raise UsageError(f"the model ties parameters of stages {wanted}: compile the schedule with --tied {wanted}")


def shared(model: Model, stages: tuple[int, ...]) -> list[dict[int, str]]:
    """The parameters that exactly these stages share: the name in each stage, by stage."""
    ties = [dict(reversed(tie)) for tie in model.tied]  # the first name of a stage counts
    return [tie for tie in ties if tuple(sorted(tie)) == stages]


class Tie:
    """The sum t.k on one rank."""

    def __init__(
        self,
        transport: Transport,
        group: MPI.Intracomm,
        sums: AllreduceQueue,
        header: Header,
        stages: tuple[int, ...],
        shared: list[dict[int, str]],
        gradients: Mapping[int, Gradient],
    ) -> None:
        """`gradients`: dw of the stages of the tie that this rank owns."""
        self.sums = sums
        # What each owned stage has of it, views into its dw.
        self.views = {
            stage: [
                view
                for tie in shared
                for name, view in zip(one.stage.names, one.stage.views(one.total), strict=True)
                if name == tie[stage]
            ]
            for stage, one in gradients.items()
        }
        some = next(iter(gradients.values())).data
        length = sum(view.numel() for view in next(iter(self.views.values())))
        # Each stage counts once: the first of its owners gives it.
        first = [header.owners[stage][0] for stage in stages]
        ranks = header.ties.sharers(header.tied.index(stages))
        keys = [[s for s, owner in zip(stages, first, strict=True) if owner == rank] for rank in ranks]
        self.gives = keys[group.rank]
        self.rows, self.total = some.new_zeros((len(self.gives), length)), some.new_zeros(length)
        self.sum = OrderedAllreduce(transport, group, self.rows, keys, self.total)

    def run(self) -> None:
        self.sums.finish()
        for row, stage in zip(self.rows, self.gives, strict=True):
            torch.cat([view.reshape(-1) for view in self.views[stage]], out=row)
        self.sums.start(self.sum)
        self.sums.finish()
        for views in self.views.values():
            for view, part in zip(views, self.total.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))
