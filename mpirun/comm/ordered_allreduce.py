"""Allreduce in a fixed order of addition, for any element type, that overlaps other instructions.

Each member of a group contributes rows of n bytes, whose sections are numbers, and every row has a key. All members
get the sum of all rows, added in ascending order of the keys: the same bits on all of them and in every run.
1. SCATTER: member m receives slice m of every row of the others and adds these slices up.
2. GATHER: every member receives the sums of the other slices.
The traffic is that of a reduce-scatter and an allgather. The last slices of short rows are empty, and never sent. MPI's
own reductions do not support bf16 and guarantee no order.

On a GPU the transfer thread advances sums, and their kernels run in a stream of their own (`gpu_transport`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.device import Mark
from mpirun.comm.transport import Receive, Transport
from mpirun.comm.waiting import Done
from schedgen.ir.weights import LINE

SCATTER, GATHER, DONE = range(3)
# Tags of the two phases. Sums with other tags may be in flight in the same group.
GRADIENT_TAGS, SLICE_TAGS = (0, 1), (2, 3)


class Section(NamedTuple):
    """Bytes `begin` to `end` are numbers of one type."""

    begin: int
    end: int
    dtype: torch.dtype


def numbers(flat: Tensor, sections: Sequence[Section], first: int = 0) -> list[Tensor]:
    """The numbers in a tensor of bytes, one tensor per type; `first`: where `flat` begins in the sections' memory."""
    spans = [(max(begin - first, 0), min(end - first, len(flat)), dtype) for begin, end, dtype in sections]
    return [flat[begin:end].view(dtype) for begin, end, dtype in spans if begin < end]


def add(totals: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
    """Add numbers to others with the same sections."""
    for total, summand in zip(totals, summands, strict=True):
        total += summand


class OrderedAllreduce:
    """A sum, prepared once and started any number of times; the result goes to each member's first row or `total`."""

    def __init__(
        self,
        transport: Transport,
        group: MPI.Intracomm,
        rows: Tensor,
        keys: Sequence[Sequence[int]],
        sections: Sequence[Section],
        total: Tensor | None = None,
        tags: tuple[int, int] = GRADIENT_TAGS,
    ) -> None:
        """`rows`: this member's, shape (k, n); `keys[m]`: the keys of member m's rows, k of them for this member.

        `sections`: of a row; `total`, shape (n,): where the sum goes; None: to this member's first row.
        """
        me, members = group.rank, group.size
        self.total = rows[0] if total is None else total
        length = -(-len(self.total) // (members * LINE)) * LINE
        slices = [slice(m * length, (m + 1) * length) for m in range(members)]
        others = [m for m in range(members) if m != me]
        self.own_slice = self.total[slices[me]]
        sums = [m for m in others if slices[m].start < len(self.total)]  # the other members whose slices are not empty
        received = rows.new_empty((sum(len(keys[m]) for m in others), len(self.own_slice)))
        free_rows = iter(received)
        slice_of = {key: row[slices[me]] for key, row in zip(keys[me], rows, strict=True)}
        self.receives: list[Receive] = []
        for m in others:
            for key in keys[m]:
                slice_of[key] = next(free_rows)
                if len(self.own_slice):
                    self.receives.append(transport.receive(slice_of[key], m, tags[SCATTER], group))
        in_order = [slice_of[key] for key in sorted(slice_of)]
        self.first_slice = in_order[0]
        self.in_order = [numbers(piece, sections, slices[me].start) for piece in in_order]
        self.scattered = [(row[slices[m]], m) for m in sums for row in rows]
        self.gathers = [transport.receive(self.total[slices[m]], m, tags[GATHER], group, summed=True) for m in sums]
        self.gather_to = others if len(self.own_slice) else []
        self.transport, self.group, self.tags = transport, group, tags
        self.under_way: list[Done] = []
        self.ended: Mark | None = None  # in the stream of sums
        self.phase = DONE

    @property
    def done(self) -> bool:
        """Whether `total` is the sum, and all sends of this member are done."""
        return self.phase >= DONE

    def start(self) -> None:
        """Start the first phase. The rows may not change from now on until the sum is done."""
        self.phase = SCATTER
        mark = self.transport.device.mark()  # after the kernels that compute the rows or read `total`
        for receive in self.receives:
            receive.start()
        sends = [self.transport.send(piece, m, self.tags[SCATTER], self.group) for piece, m in self.scattered]
        self.under_way = [*(receive.done for receive in self.receives), *sends]
        if mark is not None:
            self.under_way.append(mark.reached)

    def advance(self) -> None:
        """Begin the next phase if all messages of this one are done."""
        with self.transport.device.sums():
            self.under_way = [done for done in self.under_way if not done()]
            if self.under_way:
                return
            if self.phase == SCATTER:
                self._gather()
            else:
                self.ended = self.transport.device.mark()
            self.phase += 1

    def _gather(self) -> None:
        first, *later = self.in_order
        for piece in later:
            add(first, piece)
        if self.first_slice is not self.own_slice:
            self.own_slice.copy_(self.first_slice)
        for receive in self.gathers:
            receive.start()
        tag = self.tags[GATHER]
        sends = [self.transport.send(self.own_slice, m, tag, self.group, summed=True) for m in self.gather_to]
        self.under_way = [*(receive.done for receive in self.gathers), *sends]

    def arrive(self) -> None:
        """Make kernels launched from now on into the current stream see the sum, which is done."""
        if self.ended is not None:
            self.ended.arrive()
            self.ended = None


class AllreduceQueue:
    """The sums in flight on a rank. Those with the same tags begin to gather in the order in which they were started.

    All ranks start them in the same order. Several threads may advance sums.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.active: list[OrderedAllreduce] = []
        self.started: set[OrderedAllreduce] = set()  # since the last `finish`
        self.lock = threading.Lock()
        transport.background = self.advance

    def start(self, allreduce: OrderedAllreduce) -> None:
        """Start a sum after those in flight."""
        self.started.add(allreduce)
        with self.lock:
            allreduce.start()
            self.active.append(allreduce)

    def advance(self) -> bool:
        """Advance all sums; with the same tags, up to the first that still scatters. True if another thread does it.

        No thread waits for the lock: with words, its holder may wait for a stream that waits for the transfer thread.
        """
        if not self.lock.acquire(blocking=False):
            return True
        try:
            scattering: set[tuple[int, int]] = set()
            for allreduce in self.active:
                if allreduce.tags in scattering:
                    continue
                allreduce.advance()
                if allreduce.phase == SCATTER:
                    scattering.add(allreduce.tags)
            self.active = [allreduce for allreduce in self.active if not allreduce.done]
            return False
        finally:
            self.lock.release()

    def finish(self) -> None:
        """Wait for all sums. Kernels launched from now on see them."""

        def done() -> bool:
            self.advance()
            return not self.active

        self.transport.wait(done)
        for allreduce in self.started:
            allreduce.arrive()
        self.started.clear()
