"""Sums of gradients over the owners of a stage, going on while other instructions run.

Each member gets one slice of every row of every member, adds them up in torch
and in the order of the rows' keys, and the slices are put together again: the
traffic of a reduce-scatter and a gather, for any type, with the same bits on
all members. Plain messages carry it: MPI's own sum knows no bf16 and promises
no order.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.transport import Done, Receive, Transport
from schedgen.ir.weight_shards import LINE

SCATTER, GATHER, DONE = range(3)
GRADIENTS, EXCHANGE = (0, 1), (2, 3)  # tags of the two halves; on one group only sums with the same go on at once


class Sum:
    """Rows of shape (n,) that lie on the members of a group; the sum replaces each member's first row."""

    def __init__(
        self,
        transport: Transport,
        group: MPI.Intracomm,
        rows: Tensor,
        keys: Sequence[Sequence[int]],
        total: Tensor | None = None,
        tags: tuple[int, int] = GRADIENTS,
    ) -> None:
        """`rows`: this member's, shape (k, n); `keys[m]`: the keys of member m's rows, k of them for this one.

        A member without rows says with `total`, shape (n,), where the sum goes.
        """
        me, members = group.rank, group.size
        self.total = rows[0] if total is None else total
        line = LINE // rows.element_size()
        part = -(-len(self.total) // (members * line)) * line
        slices = [slice(m * part, (m + 1) * part) for m in range(members)]
        others = [m for m in range(members) if m != me]
        self.mine = self.total[slices[me]]
        parts = rows.new_empty((sum(len(keys[m]) for m in others), len(self.mine)))
        arrive = iter(parts)
        row_of = {key: row[slices[me]] for key, row in zip(keys[me], rows, strict=True)}
        self.receives: list[Receive] = []
        for m in others:
            for key in keys[m]:
                row_of[key] = next(arrive)
                self.receives.append(transport.receive(row_of[key], m, tags[SCATTER], group))
        self.in_order = [row_of[key] for key in sorted(row_of)]
        self.out = [(row[slices[m]], m) for m in others for row in rows]
        self.gathers = [transport.receive(self.total[slices[m]], m, tags[GATHER], group) for m in others]
        self.others, self.transport, self.group, self.tags = others, transport, group, tags
        self.under_way: list[Done] = []
        self.phase = DONE

    @property
    def done(self) -> bool:
        return self.phase >= DONE

    def start(self) -> None:
        self.phase = SCATTER
        for receive in self.receives:
            receive.start()
        sends = [self.transport.send(piece, m, self.tags[SCATTER], self.group) for piece, m in self.out]
        self.under_way = [*(receive.done for receive in self.receives), *sends]

    def advance(self) -> None:
        """Go on as far as messages have come."""
        self.under_way = [done for done in self.under_way if not done()]
        if self.under_way:
            return
        if self.phase == SCATTER:
            first, *others = self.in_order
            for part in others:
                first += part
            if first is not self.mine:
                self.mine.copy_(first)
            for receive in self.gathers:
                receive.start()
            sends = [self.transport.send(self.mine, m, self.tags[GATHER], self.group) for m in self.others]
            self.under_way = [*(receive.done for receive in self.gathers), *sends]
        self.phase += 1


class Sums:
    """Those under way. Their second halves begin in the order in which they were started, on all ranks alike."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.active: list[Sum] = []
        transport.background = self.advance

    def start(self, one: Sum) -> None:
        one.start()
        self.active.append(one)

    def advance(self) -> None:
        for one in self.active:
            one.advance()
            if one.phase == SCATTER:
                break
        self.active = [one for one in self.active if not one.done]

    def finish(self) -> None:
        """Wait for all of them."""

        def done() -> bool:
            self.advance()
            return not self.active

        self.transport.wait(done)
