"""ADD, and ALLREDUCE of a dw: sums of a stage's weight gradient over the ranks that computed it and those that own it.

1. A rank that does not own the stage sends its partial sum to an owner, whose ADD adds the rows.
2. If a stage has several owners, their ALLREDUCE starts the sum over them. It goes on while other instructions run;
   NORM, or a STEP to a version, waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpirun.comm.ordered_allreduce import OrderedAllreduce
from mpirun.engine.act import Act
from mpirun.engine.buffers import LocalBuffer
from mpirun.engine.context import Context
from schedgen.ir.instructions import Instruction


class OwnerAllreduce:
    """Prepares ADD, and ALLREDUCE over the owners of a stage, with methods like those of `Transfers`."""

    def __init__(self, context: Context, partial_sums: Mapping[tuple[int, int, int], LocalBuffer]) -> None:
        """`partial_sums`: what RECVs fill, by stage, part and sender."""
        self.context, self.partial_sums = context, partial_sums
        self.by_stage: dict[int, OrderedAllreduce] = {}

    def add(self, row: int, i: Instruction) -> Act:
        """ADD: add the partial sum that another rank has sent."""
        gradient = self.context.grad_buffers.of_unit((i.stage, i.part))
        received, wait_value = self.partial_sums[i.stage, i.part, i.peer], self.context.buffers.wait_value
        keys = self.context.slots.keys(i.peer, i.stage, i.part)

        def act() -> None:
            gradient.add_rows(keys, wait_value(received))

        return act

    def allreduce(self, row: int, i: Instruction) -> Act:
        """ALLREDUCE: start the sum of dw.s over its owners."""
        context = self.context
        if i.stage not in self.by_stage:
            keys = [context.slots.keys(rank, i.stage) for rank in context.header.groups[i.group]]
            rows, group = context.grad_buffers.of_stage(i.stage).data, context.transport.group(i.group)
            sections = context.stages[i.stage].sections
            self.by_stage[i.stage] = OrderedAllreduce(context.transport, group, rows, keys, sections)
        allreduce, start = self.by_stage[i.stage], context.allreduces.start

        def act() -> None:
            start(allreduce)

        return act
