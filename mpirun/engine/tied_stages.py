"""ALLREDUCE of a t.k: tied stages each have a copy of the parameters they share, and step it with the same gradient.

t.k is the sum, over the stages of tie k and in their order, of the gradients of the parameters that they share. It
replaces these gradients in each of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce
from mpirun.engine.act import Act
from mpirun.engine.grad_buffers import GradBuffer, GradBuffers
from mpirun.model.contract import Model
from mpirun.model.dataflow import how_to_compile
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction
from schedgen.util.errors import UsageError


def check_ties(model: Model, header: Header) -> None:
    """UsageError if the model ties stages that the schedule does not."""
    for tie in model.tied:
        stages = tuple(sorted({stage for stage, _ in tie}))
        if len(stages) > 1 and stages not in header.tied:
            if model.ties_shards(tie):
                raise UsageError(f"the schedule does not tie stages {stages}, shards of one: compile it again")
            wanted = ",".join(str(stage // header.tensor_parallel.degree) for stage in stages)
            raise UsageError(f"the model ties parameters of stages {wanted}: {how_to_compile(header)}")


def shared_parameters(model: Model, stages: tuple[int, ...]) -> list[dict[int, str]]:
    """The parameters that exactly these stages share, each as its name by stage."""
    ties = [dict(reversed(tie)) for tie in model.tied]  # the first name in a stage counts
    return [tie for tie in ties if tuple(sorted(tie)) == stages]


def tied_allreduce(
    i: Instruction, header: Header, model: Model, grad_buffers: GradBuffers, queue: AllreduceQueue, rank: int
) -> Act:
    """ALLREDUCE: sum t.k over the stages of tie k and wait for it."""
    stages = header.tied[i.tie]
    owned = {stage: grad_buffers.of_stage(stage) for stage in stages if rank in header.owners[stage]}
    row_sums = grad_buffers.claim_row_sums({(stage, -1): buffer for stage, buffer in owned.items()})
    shared = shared_parameters(model, stages)
    tie = TiedAllreduce(queue, header, i, shared, owned) if shared else None

    def act() -> None:
        for buffer in row_sums:
            buffer.sum_rows()
        if tie is not None:
            tie.run()

    return act


class TiedAllreduce:
    """The sum t.k on one rank."""

    def __init__(
        self,
        queue: AllreduceQueue,
        header: Header,
        i: Instruction,
        shared: list[dict[int, str]],
        owned: Mapping[int, GradBuffer],
    ) -> None:
        """`i`: the ALLREDUCE; `shared`: by `shared_parameters`; `owned`: dw of the tied stages that the rank owns."""
        self.queue, stages, group = queue, header.tied[i.tie], queue.transport.group(i.group)
        # Of each owned stage, the gradients of the shared parameters: views into its dw.
        self.views = {
            stage: [
                view
                for names in shared
                for name, view in zip(buffer.stage.names, buffer.stage.views(buffer.total), strict=True)
                if name == names[stage]
            ]
            for stage, buffer in owned.items()
        }
        like = next(iter(owned.values())).data
        length = sum(view.numel() for view in next(iter(self.views.values())))
        # Each stage counts once: its first owner contributes it.
        first_owner = {stage: header.owners[stage][0] for stage in stages}
        keys = [[stage for stage in stages if first_owner[stage] == member] for member in header.ties.sharers(i.tie)]
        self.contributed = keys[group.rank]
        self.rows, self.total = like.new_zeros((len(self.contributed), length)), like.new_zeros(length)
        self.allreduce = OrderedAllreduce(queue.transport, group, self.rows, keys, self.total)

    def run(self) -> None:
        """Pack the contributed gradients, wait for the sum, and copy it to all owned copies."""
        self.queue.finish()
        for row, stage in zip(self.rows, self.contributed, strict=True):
            torch.cat([view.reshape(-1) for view in self.views[stage]], out=row)
        self.queue.start(self.allreduce)
        self.queue.finish()
        for views in self.views.values():
            for view, part in zip(views, self.total.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))
