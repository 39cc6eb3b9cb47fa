"""Rule 4: every rank reaches its end even if every SEND is a rendezvous.

A SEND waits until its receiver has come to the RECV; a RECV posts and goes
on; the first use of what arrives waits until its SEND is past; a collective
waits for all members. Every rank's list is walked as far as these allow. In
which order does not matter: what can be reached does not depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import Lives
from schedgen.analysis.subject import Numbers, Subject
from schedgen.ir.instructions import Ints, Op
from schedgen.util.jit import kernel

SHOWN = 4  # rows of a circle that are named


class Waits(NamedTuple):
    """What the rows of a program wait for, apart from the row before."""

    first: Numbers  # row r uses what the SENDs in sends[first[r]:first[r + 1]] brought
    sends: Numbers
    receiver: Ints  # by row: the RECV or FETCH_W of a SEND; -1 for other rows
    collective: Ints  # by row: which collective it enters; -1 for other rows
    members: Numbers  # how many rows enter each collective


def waits(subject: Subject, found: Lives, pairs: tuple[Numbers, Numbers]) -> Waits:
    """For a program with rules 3, 6 and 7 proved; `pairs` from rule 3."""
    sends, receives = pairs
    length = len(subject.program)
    receiver, sender = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    receiver[sends], sender[receives] = receives, sends
    # `found.used` is ascending: rows are followed in order.
    first = np.searchsorted(found.used, np.arange(length + 1))
    rows = subject.having(Op.ALLREDUCE, Op.NORM)
    rows = rows[np.argsort(subject.peer[rows], kind="stable")]
    collective, members = np.full(length, -1, np.int32), [np.zeros(0, np.int64)]
    groups, bounds = np.unique(subject.peer[rows], return_index=True)
    begin = 0
    for group, mine in zip(groups.tolist(), np.split(rows, bounds[1:]), strict=False):
        ranks = subject.header.groups[group]
        rounds = len(mine) // len(ranks)  # rows stand by rank, and all ranks enter equally often
        collective[mine] = np.tile(np.arange(begin, begin + rounds), len(ranks))
        members.append(np.full(rounds, len(ranks)))
        begin += rounds
    return Waits(first, sender[found.received].astype(np.int64), receiver, collective, np.concatenate(members))


def rule_4(subject: Subject, needs: Waits) -> None:
    bounds = subject.program.bounds
    at = _walk.sized(len(subject.program))(subject.rank, bounds, *needs)
    circle = _circle(subject, needs, at)
    if circle:
        others = "; ".join(f"line {subject.where(row)}" for row in circle[1:SHOWN])
        others += f"; and {len(circle) - SHOWN} more" if len(circle) > SHOWN else ""
        subject.refuse(4, circle[0], f"waits for ever, in a circle with {others}")


@kernel
def _walk(
    rank: Ints, bounds: Numbers, first: Numbers, sends: Numbers, receiver: Ints, collective: Ints, members: Numbers
) -> Numbers:
    """Take every rank as far as it gets; the row each ends up at."""
    workers = len(bounds) - 1
    at = bounds[:-1].copy()
    left = first.copy()  # of each row, the first of its sends that may not be past
    outside = members.copy()  # of each collective, members still to arrive
    # Ranks asleep on a row (or, behind all rows, on a collective), as linked lists.
    asleep = np.full(len(rank) + len(members), -1, np.int32)
    next_asleep = np.full(workers, -1, np.int32)
    runnable = np.arange(workers)
    top = workers
    while top:
        top -= 1
        r = runnable[top]
        while at[r] < bounds[r + 1]:
            row = at[r]
            wait = -1
            if collective[row] >= 0:
                one = collective[row]
                outside[one] -= 1
                if outside[one] > 0:
                    wait = len(rank) + one
                else:
                    woken = asleep[len(rank) + one]
                    while woken >= 0:
                        at[woken] += 1
                        runnable[top] = woken
                        top += 1
                        woken = next_asleep[woken]
            else:
                while left[row] < first[row + 1] and at[rank[sends[left[row]]]] > sends[left[row]]:
                    left[row] += 1
                if left[row] < first[row + 1]:
                    wait = sends[left[row]]
                elif receiver[row] >= 0 and at[rank[receiver[row]]] <= receiver[row]:
                    wait = receiver[row]
            if wait >= 0:
                next_asleep[r] = asleep[wait]
                asleep[wait] = r
                break
            at[r] = row + 1
            woken = asleep[row]
            asleep[row] = -1
            while woken >= 0:
                runnable[top] = woken
                top += 1
                woken = next_asleep[woken]
    return at


def _circle(subject: Subject, needs: Waits, at: Numbers) -> list[int]:
    """The rows that wait for one another; empty where every rank has ended."""
    stuck = np.flatnonzero(at < subject.program.bounds[1:])
    if not len(stuck):
        return []
    entering = np.argsort(needs.collective, kind="stable")
    begin = np.searchsorted(needs.collective[entering], np.arange(len(needs.members) + 1))
    path: dict[int, int] = {}  # rows, and how many are before
    row = int(at[stuck[0]])
    while row not in path:
        path[row] = len(path)
        collective = needs.collective[row]
        if collective >= 0:
            awaited = entering[begin[collective] : begin[collective + 1]]
            awaited = awaited[at[subject.rank[awaited]] < awaited]
        else:
            awaited = np.append(needs.sends[needs.first[row] : needs.first[row + 1]], needs.receiver[row])
            awaited = awaited[(awaited >= 0) & (at[subject.rank[awaited]] <= awaited)]
        row = int(at[subject.rank[awaited[0]]])
    return list(path)[path[row] :]
