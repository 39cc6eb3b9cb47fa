"""Rule 4: every rank reaches its end even if every SEND is a rendezvous.

A SEND waits until its receiver has come to the RECV; a RECV posts and goes
on; the first use of what arrives waits until its SEND is past; a collective
waits for all members. Every rank's list is walked as far as these allow. In
which order does not matter: what can be reached does not depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.check.lives import Lives
from schedgen.check.subject import Numbers, Subject
from schedgen.program import Op


class Waits(NamedTuple):
    """What the rows of a program wait for, apart from the row before."""

    first: list[int]  # row r uses what the SENDs sends[first[r]:first[r + 1]] brought
    sends: list[int]
    receiver: dict[int, int]  # the RECV or FETCH_W of each SEND
    entrants: list[list[int]]  # the rows of each collective
    collective: dict[int, int]  # which of these a row belongs to


def waits(subject: Subject, found: Lives, pairs: tuple[Numbers, Numbers]) -> Waits:
    """For a program with rules 3, 6 and 7 proved; `pairs` from rule 3."""
    sends, receives = pairs
    sender = np.full(len(subject.program), -1)
    sender[receives] = sends
    used, brought = found.used, sender[found.received]
    order = np.argsort(used, kind="stable")
    first = np.searchsorted(used[order], np.arange(len(subject.program) + 1))
    rows = subject.having(Op.ALLREDUCE, Op.NORM)
    entrants: list[list[int]] = []
    for group, members in enumerate(subject.header.groups):
        mine = rows[subject.peer[rows] == group]
        entrants += mine.reshape(len(members), -1).T.tolist()
    return Waits(
        first.tolist(),
        brought[order].tolist(),
        dict(zip(sends.tolist(), receives.tolist(), strict=True)),
        entrants,
        {row: i for i, together in enumerate(entrants) for row in together},
    )


def rule_4(subject: Subject, needs: Waits) -> None:
    rank_of = subject.rank.tolist()
    at = _walk(subject, needs, rank_of)
    circle = _circle(subject, needs, rank_of, at)
    if circle:
        others = "; ".join(f"line {subject.where(row)}" for row in circle[1:])
        subject.refuse(4, circle[0], f"waits for ever, in a circle with {others}")


def _awaited(needs: Waits, row: int) -> list[int]:
    """The rows that must be past before `row`, which is no collective, can be."""
    brought = needs.sends[needs.first[row] : needs.first[row + 1]]
    return [*brought, needs.receiver[row]] if row in needs.receiver else brought


def _walk(subject: Subject, needs: Waits, rank_of: list[int]) -> list[int]:
    """Take every rank as far as it gets; the row each stands at."""
    bounds: list[int] = subject.program.bounds.tolist()
    at, ends = bounds[:-1], bounds[1:]
    outside = [len(together) for together in needs.entrants]  # members still to arrive
    asleep: dict[int, list[int]] = {}  # ranks by the row (or -1 - collective) they wait for
    runnable = list(range(len(at)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < ends[rank]:
            row = at[rank]
            if row in needs.collective:
                one = needs.collective[row]
                outside[one] -= 1
                if outside[one] > 0:
                    asleep.setdefault(-1 - one, []).append(rank)
                    break
                for other in asleep.pop(-1 - one, []):
                    at[other] += 1
                    runnable.append(other)
            else:
                missing = next((r for r in _awaited(needs, row) if at[rank_of[r]] <= r), -1)
                if missing >= 0:
                    asleep.setdefault(missing, []).append(rank)
                    break
            at[rank] = row + 1
            if row in asleep:
                runnable += asleep.pop(row)
    return at


def _circle(subject: Subject, needs: Waits, rank_of: list[int], at: list[int]) -> list[int]:
    """The rows that wait for one another; empty where every rank has ended."""
    ends = subject.program.bounds[1:].tolist()
    stuck = [rank for rank in range(len(at)) if at[rank] < ends[rank]]
    if not stuck:
        return []
    path: list[int] = []
    row = at[stuck[0]]
    while row not in path:
        path.append(row)
        if row in needs.collective:
            missing = next(r for r in needs.entrants[needs.collective[row]] if at[rank_of[r]] < r)
        else:
            missing = next(r for r in _awaited(needs, row) if at[rank_of[r]] <= r)
        row = at[rank_of[missing]]
    return path[path.index(row) :]
