"""The named values of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpirun.comm.transport import NO_ROW, Transport
from mpirun.comm.waiting import Done

Key = tuple[int, int, int, int]  # kind, stage, microbatch, consumer or part: a buffer's name


class Buffer:
    """A named value on this rank: what it holds, what brings it and what takes it away.

    Rows are those of the instructions that began the transfers.
    """

    __slots__ = ("arriving", "leaving", "row", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.arriving: Done | None = None
        self.row = NO_ROW
        self.leaving: list[tuple[Done, int]] = []


class Buffers:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.named: dict[Key, Buffer] = {}

    def __call__(self, kind: int, stage: int, mb: int = -1, via: int = -1) -> Buffer:
        return self.named.setdefault((kind, stage, mb, via), Buffer())

    def ready(self, buffer: Buffer) -> Any:
        """The value of a buffer, once it is there."""
        if buffer.arriving is not None:
            self.transport.wait(buffer.arriving, buffer.row)
            buffer.arriving = None
        return buffer.value

    def all_ready(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.ready(buffer)

    def left(self, buffer: Buffer) -> None:
        """Wait until a buffer has left for everyone it was sent to."""
        for done, row in buffer.leaving:
            self.transport.wait(done, row)
        buffer.leaving.clear()
