"""The named values of a rank (x, g, w, dw), each with the transfers in flight that fill it or read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpirun.comm.transport import NO_ROW, Transport
from mpirun.comm.waiting import Done
from schedgen.ir.instructions import Instruction

Key = tuple[int, int, int, int]  # kind, stage, microbatch, consumer or shard: a buffer's name


class LocalBuffer:
    """A named value, the receive that fills it, and the sends that read it, each with the row that started it."""

    __slots__ = ("arriving", "receive_row", "sends", "value")

    def __init__(self) -> None:
        """An empty buffer without transfers."""
        self.value: Any = None
        self.arriving: Done | None = None
        self.receive_row = NO_ROW
        self.sends: list[tuple[Done, int]] = []


class LocalBuffers:
    """The buffers of a rank by name, and the waits for their transfers."""

    def __init__(self, transport: Transport) -> None:
        """`transport`: makes progress on transfers during a wait."""
        self.transport = transport
        self.by_name: dict[Key, LocalBuffer] = {}

    def get(self, kind: int, stage: int, mb: int = -1, piece: int = -1) -> LocalBuffer:
        """The buffer of this name, created on first use; `piece`: the consumer of an x or g, the shard of a w or dw."""
        key = kind, stage, mb, piece
        if key not in self.by_name:
            self.by_name[key] = LocalBuffer()
        return self.by_name[key]

    def named_by(self, i: Instruction) -> LocalBuffer:
        """The buffer that an instruction names."""
        return self.get(i.kind, i.stage, i.mb, i.piece)

    def wait_value(self, buffer: LocalBuffer) -> Any:
        """Wait until a buffer has arrived, and return its value."""
        if buffer.arriving is not None:
            self.transport.wait(buffer.arriving, buffer.receive_row)
            buffer.arriving = None
        return buffer.value

    def wait_values(self, buffers: Sequence[LocalBuffer]) -> None:
        """Wait until all these buffers have arrived."""
        for buffer in buffers:
            self.wait_value(buffer)

    def wait_sent(self, buffer: LocalBuffer) -> None:
        """Wait until all sends of a buffer are done."""
        for done, row in buffer.sends:
            self.transport.wait(done, row)
        buffer.sends.clear()
