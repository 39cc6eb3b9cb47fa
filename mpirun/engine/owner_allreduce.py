"""ADD, and ALLREDUCE of a dw: the sums of a stage's weight gradient over the ranks that computed it and that own it.

1. A rank that does not own the stage sends its partial sum to an owner, whose ADD adds the rows.
2. If a stage has several owners, their ALLREDUCE starts the sum over them. It goes on while other instructions run;
   NORM, or a STEP to a version, waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce
from mpirun.engine.act import Act
from mpirun.engine.buffers import Buffer, Buffers
from mpirun.engine.grad_buffers import GradBuffers
from mpirun.engine.memory_slots import MemorySlots
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction


class OwnerAllreduce:
    """Prepares ADD, and ALLREDUCE over the owners of a stage; methods as those of `Messages`."""

    def __init__(
        self,
        header: Header,
        buffers: Buffers,
        partial_sums: Mapping[tuple[int, int, int], Buffer],
        grad_buffers: GradBuffers,
        slots: MemorySlots,
        queue: AllreduceQueue,
    ) -> None:
        """`partial_sums`: what RECVs fill, by stage, part and sender; `queue`: the sums under way on this rank."""
        self.header, self.buffers, self.partial_sums = header, buffers, partial_sums
        self.grad_buffers, self.slots, self.queue = grad_buffers, slots, queue
        self.by_stage: dict[int, OrderedAllreduce] = {}

    def add(self, row: int, i: Instruction) -> Act:
        """ADD: add the partial sum that another rank has sent."""
        gradient, received = self.grad_buffers.of_unit((i.stage, i.part)), self.partial_sums[i.stage, i.part, i.peer]
        keys = self.slots.keys(i.peer, i.stage, i.part)

        def act() -> None:
            gradient.add_rows(keys, self.buffers.wait_value(received))

        return act

    def allreduce(self, row: int, i: Instruction) -> Act:
        """ALLREDUCE: start the sum of dw.s over its owners."""
        if i.stage not in self.by_stage:
            keys = [self.slots.keys(rank, i.stage) for rank in self.header.groups[i.group]]
            transport, rows = self.queue.transport, self.grad_buffers.of_stage(i.stage).data
            self.by_stage[i.stage] = OrderedAllreduce(transport, transport.group(i.group), rows, keys)
        allreduce = self.by_stage[i.stage]

        def act() -> None:
            self.queue.start(allreduce)

        return act
