"""FETCH_W, RECV, SEND and FREE: transfers of buffers between ranks, each prepared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mpirun.comm.transport import Transport
from mpirun.engine.act import Act, in_order
from mpirun.engine.buffers import Buffer, Buffers
from mpirun.engine.grad_buffers import GradBuffers
from mpirun.engine.memory_slots import MemorySlots
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import first_fetches
from mpirun.model.dataflow import Dataflow
from schedgen.ir.instructions import Instruction, Kind


class Messages:
    """Prepares the instructions that start transfers, and FREE, which ends them.

    A method takes the row of an instruction and the instruction, and returns the act.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        stages: Mapping[int, LocalStage],
        transport: Transport,
        buffers: Buffers,
        grad_buffers: GradBuffers,
        slots: MemorySlots,
        dataflows: Sequence[Dataflow],
    ) -> None:
        """`stages`: by number, those on this rank; `dataflows`: by microbatch."""
        self.stages, self.transport, self.buffers = stages, transport, buffers
        self.grad_buffers, self.slots, self.dataflows = grad_buffers, slots, dataflows
        self.partial_sums: dict[tuple[int, int, int], Buffer] = {}  # received dw, by stage, part and sender
        self.first_fetches = first_fetches(instructions)

    def fetch_w(self, row: int, i: Instruction) -> Act:
        """FETCH_W: start receiving weights; the first part of a copy brings the rank's own parts along."""
        stage = self.stages[i.stage]
        weights = stage.weights[stage.part_slices[i.part]]
        act = self._receive(row, i, Kind.W, self.buffers.get(Kind.W, i.stage, via=i.part), weights)
        return in_order(stage.owned_parts_copier(), act) if row in self.first_fetches and stage.owned else act

    def recv(self, row: int, i: Instruction) -> Act:
        """RECV: start receiving an x, a g or another rank's partial sum of a dw into its memory slot."""
        if i.kind == Kind.DW:
            buffer = self.partial_sums[i.stage, i.part, i.peer] = Buffer()
            stage = self.stages[i.stage]
            span = stage.part_slices[i.part]
            shape = (len(self.slots.keys(i.peer, i.stage, i.part)), span.stop - span.start)
            memory = self.slots.received(i, shape, stage.dtype)
        else:
            buffer = self.buffers.get(*i[1:5])
            memory = self.slots.received(i, *self.dataflows[i.mb].bundle(i.kind, i.stage, i.consumer).spec)
        return self._receive(row, i, i.kind, buffer, memory)

    def _receive(self, row: int, i: Instruction, tag: int, buffer: Buffer, memory: Tensor) -> Act:
        start, done = self.transport.receive(memory, i.peer, tag)

        def act() -> None:
            start()
            buffer.value, buffer.arriving, buffer.receive_row = memory, done, row

        return act

    def send(self, row: int, i: Instruction) -> Act:
        """SEND: start sending a buffer, once it has arrived if it was received."""
        buffer, peer, kind = self.buffers.get(*i[1:5]), i.peer, i.kind
        prepare = None
        if kind == Kind.W:
            stage = self.stages[i.stage]
            buffer.value = stage.owned[i.part] if i.part in stage.owned else stage.weights[stage.part_slices[i.part]]
        elif kind == Kind.DW:
            buffer.value, prepare = self.grad_buffers.of_unit((i.stage, i.part)).message()

        def act() -> None:
            buffer.sends.append((self.transport.send(self.buffers.wait_value(buffer), peer, kind), row))

        return act if prepare is None else in_order(prepare, act)

    def free(self, row: int, i: Instruction) -> Act:
        """FREE: wait until the buffer's transfers are done; an x or g then gives up its memory."""
        buffer, keep = self.buffers.get(*i[1:5]), i.kind in (Kind.W, Kind.DW)

        def act() -> None:
            self.buffers.wait_sent(buffer)
            self.buffers.wait_value(buffer)  # it may have been received without being used
            if not keep:
                buffer.value = None

        return act
