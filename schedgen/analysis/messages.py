"""Messages: which RECV or FETCH_W every SEND is matched with, and which rows enter one collective together.

From these follows the wait graph: which rows every row waits for, apart from the row before it on its rank. A SEND
waits until its receiver has reached the RECV or FETCH_W (rendezvous); the first use of what arrives waits until its
SEND has been executed; a collective waits for all its members.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import Lifetimes
from schedgen.ir.effects import COLLECTIVES, RECEIVERS, SENDERS
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.util.arrays import AnyInts, Ints, Numbers, stable_order


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
        """Whether every SEND has its receive, and every receive its SEND."""
        return self.matched == len(self.sends) == len(self.receives)


def match_messages(program: Program, part: AnyInts | None = None) -> Messages:
    """Match the SENDs and the receives of a projected program, up to the first pair that does not match.

    `part`: by row, what distinguishes channels in place of the kind, not below 0.
    """
    table, workers = program.rows, program.header.workers
    part = table.kind if part is None else part
    parts = int(part.max(initial=0)) + 1

    def by_channel(rows: Numbers, source: AnyInts, to: AnyInts) -> Numbers:
        channel = (source[rows].astype(np.int64) * workers + to[rows]) * parts + part[rows]
        return rows[stable_order(channel)]

    sends = by_channel(program.rows_of(*SENDERS), table.rank, table.operand)
    receives = by_channel(program.rows_of(*RECEIVERS), table.operand, table.rank)
    length = min(len(sends), len(receives))
    a, b = sends[:length], receives[:length]
    same = (table.rank[a] == table.operand[b]) & (table.operand[a] == table.rank[b])
    for column in (table.kind, table.stage, table.mb, table.piece):
        same &= column[a] == column[b]
    return Messages(sends, receives, length if same.all() else int(np.argmin(same)))


def names(program: Program) -> Numbers:
    """By row, a number for the name of the buffer that it names, in the order of kind, stage, microbatch, piece."""
    table, header = program.rows, program.header
    number = table.kind.astype(np.int64)
    for column, count in (
        (table.stage, header.stages),
        (table.mb, header.microbatches),
        (table.piece, table.piece.max()),
    ):
        number = number * (int(count) + 2) + column + 1
    order: Numbers = np.unique(number, return_inverse=True)[1]
    return order


def entries(program: Program) -> list[tuple[int, Numbers]]:
    """For every group with collectives: its index, and the rows that enter them, ascending and so sorted by rank."""
    rows = program.rows_of(*COLLECTIVES)
    rows = rows[np.argsort(program.rows.group[rows], kind="stable")]
    groups, begin = np.unique(program.rows.group[rows], return_index=True)
    return list(zip(groups.tolist(), np.split(rows, begin[1:]), strict=False))


class Waits(NamedTuple):
    """The wait graph as arrays by row, -1: none; only for programs for which rules 3, 6 and 7 are proved."""

    first: Ints  # row r is the first to use what SENDs sends[first[r] : first[r + 1]] bring; shape (rows + 1,)
    sends: Ints  # SENDs, and RELOADs, each of which is the SEND of what it brings
    receiver: Ints  # of a SEND: the RECV or FETCH_W
    collective: Ints  # of an ALLREDUCE or NORM: the number of the collective it enters ...
    members: Numbers  # ... and by that number, how many rows enter it


def wait_graph(program: Program, lifetimes: Lifetimes, messages: Messages) -> Waits:
    """The wait graph, from the lifetimes and the matched messages."""
    length = len(program)
    receiver, sender = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    receiver[messages.sends], sender[messages.receives] = messages.receives, messages.sends
    reloads = program.rows_of(Op.RELOAD)
    sender[reloads] = reloads
    first = np.zeros(length + 1, np.int32)
    first[1:] = np.cumsum(np.bincount(lifetimes.users, minlength=length))
    collective, members = np.full(length, -1, np.int32), [np.zeros(0, np.int64)]
    begin = 0
    for group, rows in entries(program):
        size = len(program.header.groups[group])
        rounds = len(rows) // size  # by rule 6 all members enter equally often
        collective[rows] = np.tile(np.arange(begin, begin + rounds), size)
        members.append(np.full(rounds, size))
        begin += rounds
    return Waits(first, sender[lifetimes.received], receiver, collective, np.concatenate(members))
