"""BPipe: ranks that save many forwards lend some of them to ranks that save few [Kim et al. 2023, section 3].

Ranks are paired by how many forwards each saves at most, the fullest with the emptiest: in 1F1B rank r with p - 1 - r.
What the first of a pair evicts is with the second until the backward. Each message has the time of `prefetch` jobs, or
of fewer if the fullest rank would else hold as much:

    evicts:  FWD s.b   SEND   1 ... prefetch jobs   FREE   jobs ...   RECV   1 ... prefetch jobs   BWD s.b
    holds:             RECV   jobs ...                                SEND   1 ... prefetch jobs   FREE

No rank holds more forwards than a limit, the least one for which every pair has room: who would hold more evicts what
is needed last. FREEs come directly before a job, behind what the job before it sends.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from schedgen.compiler.passes.send_recv import transfers
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import COMPUTE, B, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows
from schedgen.util.arrays import Numbers
from schedgen.util.errors import UsageError


class _Saved(NamedTuple):
    """What the forwards of a rank save; one array entry a forward, from `stage` on."""

    rank: int
    jobs: Numbers  # the rows of all its jobs
    change: Numbers  # by place among them, and behind the last: how many more are saved than at the place before
    stage: Numbers
    mb: Numbers
    # The places of the job that saves it, FWD or RECOMPUTE, of the first that reads it, BWD or BWD_I, and of the last.
    begin: Numbers
    use: Numbers
    end: Numbers


def evict(program: Program, placed: PlacedScheme) -> Program:
    """The program in which ranks lend others what they save, if the options say so; UsageError if it is no help."""
    if not placed.options.evict:
        return program
    saved = _saved(program, placed)
    most = np.array([np.cumsum(each.change).max() for each in saved])
    fullest, emptiest = (np.argsort(by, kind="stable")[: (len(most) + 1) // 2] for by in (-most, most))
    least = -(-(most[fullest] + most[emptiest]).max() // 2)
    for ahead in range(placed.options.prefetch, -1, -1):
        for limit in range(least, most.max()):
            pairs = [(saved[a], saved[b]) for a, b in zip(fullest, emptiest, strict=True) if most[a] > limit]
            loans = [loan for pair in pairs if (loan := _loan(*pair, limit, ahead)) is not None]
            if len(loans) == len(pairs):
                new, after = zip(*(part for parts in zip(*loans, strict=True) for part in parts), strict=True)
                return program.insert(concatenate([*new]), after=np.concatenate(after))
    raise UsageError("--evict: no rank would hold less: it needs what it saves too soon, or no other rank has room")


def _saved(program: Program, placed: PlacedScheme) -> list[_Saved]:
    jobs, batches, saved = program.rows_of(*COMPUTE), program.header.microbatches, list[_Saved]()
    begin = np.where(placed.redone, program.job_rows(Op.RECOMPUTE), program.job_rows(Op.FWD))
    by_job = [by.ravel() for by in (begin, program.job_rows(Op.BWD, Op.BWD_I), program.job_rows(Op.BWD, Op.BWD_W))]
    for rank in range(placed.workers):
        mine, number = jobs[program.rows.rank[jobs] == rank], np.flatnonzero(placed.compute[B] == rank)
        begin, use, end = (np.searchsorted(mine, by[number]) for by in by_job)
        change = np.bincount(begin, minlength=len(mine) + 1) - np.bincount(end + 1, minlength=len(mine) + 1)
        saved.append(_Saved(rank, mine, change, number // batches, number % batches, begin, use, end))
    return saved


def _evicted(saved: _Saved, limit: int, ahead: int) -> Numbers | None:
    """Which forwards a rank evicts, so that it holds at most `limit` during every job; None: it has to hold more."""
    away, back = saved.begin + ahead + 1, saved.use - ahead  # the places between which each would be elsewhere
    held, change, elsewhere = 0, saved.change.copy(), list[int]()
    leaves = {int(away[k]): int(k) for k in np.flatnonzero(away < back)}  # at most one at a place
    candidates: list[tuple[int, int]] = []  # a heap: what is needed last comes first
    for place in range(len(saved.jobs)):
        held += int(change[place])
        if place in leaves:
            heappush(candidates, (-int(back[leaves[place]]), leaves[place]))
        while held > limit:
            if not candidates or -candidates[0][0] <= place:
                return None
            elsewhere.append(heappop(candidates)[1])
            held -= 1
            change[back[elsewhere[-1]]] += 1
    return np.sort(elsewhere)


def _loan(saved: _Saved, other: _Saved, limit: int, ahead: int) -> list[tuple[Rows, Numbers]] | None:
    """What is inserted after which rows, so that neither holds more than `limit`; None: one of them would."""
    k = _evicted(saved, limit, ahead)
    if k is None:
        return None
    needed = saved.jobs[saved.use[k] - ahead]  # the job before which it comes back
    at_end = np.full(ahead + 1, max(saved.jobs[-1], other.jobs.max(initial=0)) + 1)
    freed_there = np.append(other.jobs, at_end)[np.searchsorted(other.jobs, needed) + ahead] - 1
    sent, freed = (saved.jobs[saved.begin[k] + after] - 1 for after in (1, ahead + 1))
    # What the other holds: its own, each until its last job is done, and what is lent, in the order of the list.
    rows_of = 4 * other.jobs[other.begin], 4 * other.jobs[other.end] + 1, 4 * sent + 2, 4 * freed_there + 3
    change = np.repeat([1, -1, 1, -1], [*map(len, rows_of)])[np.argsort(np.concatenate(rows_of), kind="stable")]
    if np.cumsum(change).max() > limit:
        return None
    here, there = (np.full(len(k), each.rank) for each in (saved, other))
    name = {"stage": saved.stage[k], "mb": saved.mb[k]}
    return [  # in this order where they meet
        transfers(Op.RECV, Kind.SAVED, here, there, sent, **name),
        (rows(Op.FREE, here, kind=Kind.SAVED, **name), freed),
        (rows(Op.FREE, there, kind=Kind.SAVED, **name), freed_there),
        transfers(Op.RECV, Kind.SAVED, there, here, needed - 1, **name),
    ]
