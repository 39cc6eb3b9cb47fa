"""Messages: which RECV or FETCH_W every SEND is matched with, and which rows enter one collective together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.ir.effects import COLLECTIVES, RECEIVERS, SENDERS
from schedgen.ir.instructions import AnyInts, Kind, Numbers
from schedgen.ir.program import Program
from schedgen.util.sort import stable_order


class Messages(NamedTuple):
    """The k-th SEND and the k-th receive, channel by channel; a channel is sender, receiver and kind.

    Messages of one kind between two ranks arrive in the order in which they are sent, so the k-th SEND of a channel is
    matched with its k-th RECV or FETCH_W. In a damaged program only the first `matched` pairs belong together.
    """

    sends: Numbers  # rows
    receives: Numbers  # rows
    matched: int  # the leading pairs in which both rows are of one channel and name one buffer

    @property
    def complete(self) -> bool:
        """Whether every SEND has its receive, and the other way round."""
        return self.matched == len(self.sends) == len(self.receives)


def match_messages(program: Program) -> Messages:
    """Match the messages of a projected program, as far as they match."""
    table, workers = program.rows, program.header.workers

    def by_channel(rows: Numbers, source: AnyInts, to: AnyInts) -> Numbers:
        channel = (source[rows].astype(np.int64) * workers + to[rows]) * len(Kind) + table.kind[rows]
        return rows[stable_order(channel)]

    sends = by_channel(program.rows_of(*SENDERS), table.rank, table.peer)
    receives = by_channel(program.rows_of(*RECEIVERS), table.peer, table.rank)
    length = min(len(sends), len(receives))
    a, b = sends[:length], receives[:length]
    same = (table.rank[a] == table.peer[b]) & (table.peer[a] == table.rank[b])
    for column in (table.kind, table.stage, table.mb, table.via):
        same &= column[a] == column[b]
    return Messages(sends, receives, length if same.all() else int(np.argmin(same)))


def entries(program: Program) -> list[tuple[int, Numbers]]:
    """By group: (group, the rows that enter its collectives); rows ascend, so they are sorted by rank."""
    rows = program.rows_of(*COLLECTIVES)
    rows = rows[np.argsort(program.rows.peer[rows], kind="stable")]
    groups, begin = np.unique(program.rows.peer[rows], return_index=True)
    return list(zip(groups.tolist(), np.split(rows, begin[1:]), strict=False))
