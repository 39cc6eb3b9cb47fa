"""The named values of a rank (x, g, w, dw), each with the transfers in flight that fill it or read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mpirun.comm.transport import NO_ROW, Transport
from mpirun.comm.waiting import Done
from mpirun.model.dataflow import Bundle
from schedgen.ir.instructions import Instruction

Key = tuple[int, int, int, int]  # kind, stage, microbatch, consumer or shard: a buffer's name


class LocalBuffer:
    """A named value, the receive that fills it, and the sends that read it, each with the row that started it."""

    __slots__ = ("arriving", "receive_row", "sends", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.arriving: Done | None = None
        self.receive_row = NO_ROW
        self.sends: list[tuple[Done, int]] = []


class LocalBuffers:
    """The buffers of a rank by name, and the waits for their transfers."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.by_name: dict[Key, LocalBuffer] = {}
        self.partial_sums: dict[tuple[int, int, int], LocalBuffer] = {}  # of a dw, by stage, shard and sender

    def get(self, kind: int, stage: int, mb: int = -1, piece: int = -1) -> LocalBuffer:
        """The buffer of this name, created on first use; `piece`: the consumer of an x or g, the shard of a w or dw."""
        return self.by_name.setdefault((kind, stage, mb, piece), LocalBuffer())

    def named_by(self, i: Instruction) -> LocalBuffer:
        """The buffer that an instruction names."""
        return self.get(i.kind, i.stage, i.mb, i.piece)

    def wait_value(self, buffer: LocalBuffer) -> Any:
        """Wait until a buffer has arrived, and return its value."""
        if buffer.arriving is not None:
            self.transport.wait(buffer.arriving, buffer.receive_row)
            buffer.arriving = None
        return buffer.value

    def wait_sent(self, buffer: LocalBuffer) -> None:
        """Wait until all sends of a buffer are done: from then on its memory may change."""
        for done, row in buffer.sends:
            self.transport.wait(done, row)
        buffer.sends.clear()

    def getter(self, buffers: Sequence[LocalBuffer], bundles: Sequence[Bundle]) -> Callable[[], list[Tensor]]:
        """A function that waits for buffers, and returns the tensors in their messages, one after the other."""
        wait_value = self.wait_value
        single = all(len(bundle.indices) == 1 for bundle in bundles)
        if single and len(buffers) == 1:  # the usual case, without a frame more
            (only,) = buffers
            return lambda: [only.value if only.arriving is None else wait_value(only)]

        def values() -> list[Tensor]:
            return [x.value if x.arriving is None else wait_value(x) for x in buffers]

        if single:
            return values
        return lambda: [x for message, of in zip(values(), bundles, strict=True) for x in of.unpack(message)]


def putter(
    buffers: Sequence[LocalBuffer], bundles: Sequence[Bundle], picks: Sequence[Sequence[int]], device: torch.device
) -> Callable[[list[Tensor]], object]:
    """A function that puts tensors into buffers; `picks`: by buffer, the numbers of those that its message has."""
    if [*picks] == [[0]]:
        (only,) = buffers
        return lambda tensors: setattr(only, "value", tensors[0])

    def put(tensors: list[Tensor]) -> None:
        for buffer, bundle, pick in zip(buffers, bundles, picks, strict=True):
            buffer.value = bundle.pack([tensors[number] for number in pick], device)

    return put


def in_turn(bundles: Sequence[Bundle]) -> list[list[int]]:
    """The picks where each bundle has the next tensors."""
    ends = accumulate((len(bundle.indices) for bundle in bundles), initial=0)
    return [[*range(*span)] for span in pairwise(ends)]
