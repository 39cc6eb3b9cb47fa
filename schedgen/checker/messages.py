"""Rule 3, every SEND has its RECV or FETCH_W, and rule 6, collectives agree."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from schedgen.analysis.subject import Numbers, Subject
from schedgen.ir.instructions import EXCHANGED, Ints, Kind, Op, Small
from schedgen.util.errors import clip


def rule_3(subject: Subject) -> tuple[Numbers, Numbers]:
    """The SEND rows and, pair by pair, the rows that receive them.

    Messages of one kind between two ranks arrive in the order they are sent,
    so the k-th SEND of a channel belongs to its k-th RECV or FETCH_W.
    """
    rank, peer, kind = subject.rank, subject.peer, subject.kind
    sends, receives = subject.having(Op.SEND), subject.having(Op.RECV, Op.FETCH_W)
    for rows in (sends, receives):
        for row in rows[peer[rows] == rank[rows]][:1]:
            subject.refuse(3, int(row), "a rank does not send to itself")
    sends = sends[_by_channel(rank[sends], peer[sends], kind[sends], subject.header.workers)]
    receives = receives[_by_channel(peer[receives], rank[receives], kind[receives], subject.header.workers)]
    length = min(len(sends), len(receives))
    a, b = sends[:length], receives[:length]
    channel = (rank[a] == peer[b]) & (peer[a] == rank[b]) & (kind[a] == kind[b])
    same = channel
    for column in (subject.stage, subject.mb, subject.via):
        same = same & (column[a] == column[b])
    wrong = np.append(np.flatnonzero(~same), length)
    i = int(wrong[0])
    if i < length and channel[i]:
        reason = f"the next message of this kind from rank {peer[b[i]]} is line {subject.where(int(a[i]))}"
        subject.refuse(3, int(b[i]), reason)
    if i < length or len(sends) != len(receives):
        _unmatched(subject, sends[i : i + 1], receives[i : i + 1])
    return sends, receives


def _by_channel(source: Ints, to: Ints, kind: Small, workers: int) -> Numbers:
    """The order that sorts messages by channel and leaves each channel's in theirs."""
    return np.argsort((source.astype(np.int64) * workers + to) * len(Kind) + kind, kind="stable")


def _unmatched(subject: Subject, send: Numbers, receive: Numbers) -> NoReturn:
    """One channel has run out of partners: the earlier channel of the two."""
    rank, peer, kind = subject.rank, subject.peer, subject.kind
    send_channels = [(rank[row], peer[row], kind[row]) for row in send]
    receive_channels = [(peer[row], rank[row], kind[row]) for row in receive]
    if not receive_channels or (send_channels and send_channels < receive_channels):
        subject.refuse(3, int(send[0]), f"rank {peer[send[0]]} never receives this")
    subject.refuse(3, int(receive[0]), f"rank {peer[receive[0]]} never sends this")


def rule_6(subject: Subject) -> None:
    rows = subject.having(Op.ALLREDUCE, Op.NORM)
    rows = rows[np.argsort(subject.peer[rows], kind="stable")]
    groups, bounds = np.unique(subject.peer[rows], return_index=True)
    # Shards of a stage enter an exchange under names of their own.
    shards = np.where(np.isin(subject.kind, EXCHANGED), subject.header.tensor_parallel.degree, 1)
    columns = subject.op, subject.kind, subject.stage // shards, subject.mb, subject.via // shards
    for group, mine in zip(groups.tolist(), np.split(rows, bounds[1:]), strict=False):
        members = subject.header.groups[group]
        for row in mine[~np.isin(subject.rank[mine], members)][:1]:
            subject.refuse(6, int(row), f"this rank is not in group {group}, {clip(str(list(members)))}")
        starts = np.searchsorted(subject.rank[mine], members)
        ends = np.searchsorted(subject.rank[mine], members, side="right")
        first = mine[starts[0] : ends[0]].tolist()
        for rank, start, end in zip(members, starts, ends, strict=True):
            entered = mine[start:end].tolist()
            for a, b in zip(first, entered, strict=False):
                if any(column[a] != column[b] for column in columns):
                    subject.refuse(6, b, f"here rank {members[0]} enters line {subject.where(a)}")
            if len(first) != len(entered):
                longer, other = (first, rank) if len(first) > len(entered) else (entered, members[0])
                row = longer[min(len(first), len(entered))]
                subject.refuse(6, row, f"rank {other} of group {group} does not enter this")
