"""Repair: the order of messages in which a list is safe on a transport that delivers in order, jobs left in place.

The list is executed with messages that only their own SEND and receive delay. Where a communicator's operations can
happen in the order of the list, they do; where nothing can happen, one that could overtakes. This gives all events one
order. On each rank the operations of a communicator are then brought into this order, by moving some of them down, none
further than directly behind one that comes before it: so a row is never moved beyond what waits for it, and no event
has to follow a later one. With +batch, all messages of a rank are brought into the order of its events, so that a batch
holds nothing that happens only after what its rank does next.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from schedgen.analysis import Analysis, analyse
from schedgen.analysis.events import events
from schedgen.checker.deadlock import refuse_circle
from schedgen.checker.proof import Proof
from schedgen.ir.program import Program
from schedgen.ir.transport import MESSAGES, Transport, communicators
from schedgen.util.arrays import Numbers


class Repaired(NamedTuple):
    """A program with its messages in another order."""

    program: Program
    moved: Numbers  # rows of the program as it was ...
    behind: Numbers  # ... and the row that each of them is now behind


def repair(program: Program, name: str, transport: Transport) -> Repaired:
    """The program with messages moved so that rule 4 holds on the transport.

    All rules but 3, 4 and 11 must be proved, and every SEND must have its receive. RefusedFile, which calls the file
    `name`, if jobs wait for one another wherever the messages stand.
    """
    analysis, rank, row = analyse(program), program.rows.rank.astype(np.int64), np.arange(len(program))
    carried, is_message = communicators(program, transport), program.is_one_of(*MESSAGES)
    queue = np.where(carried < 0, -1, rank * (carried.max(initial=0) + 1) + carried)
    for touched in (None, analysis.accesses):
        free = np.full(len(program), -1)
        all = events(
            program, analysis.lifetimes, analysis.named, analysis.waits.collective, free, touched=touched
        )
        happened = all.execute(queue)
        if len(happened) == all.count:
            break
    else:
        refuse_circle(Proof(program, name), all, happened)
    turn = np.empty(all.count, np.int64)
    turn[happened] = np.arange(all.count)
    at, last = turn[all.of_row], np.where(is_message, -1, row)
    if touched is not None:
        new = np.lexsort((at, rank))
        behind, was = np.maximum.accumulate(last[new])[np.argsort(new)], np.maximum.accumulate(last)
        moved = np.flatnonzero(is_message & (behind != was))
        return Repaired(_reordered(program, new), moved, behind[moved])
    ordered, queue = (row, rank) if transport.batch else (np.flatnonzero(carried >= 0), queue)
    order = ordered[np.lexsort((at[ordered], queue[ordered]))]
    above = np.unique(queue[order], return_inverse=True)[1] * len(program)  # apart, so that one maximum does for all
    behind = row.copy()
    behind[order] = np.maximum.accumulate(order + above) - above
    moved = np.flatnonzero(behind != row)
    return Repaired(_reordered(program, np.lexsort((at, behind))), moved, behind[moved])


def _reordered(program: Program, rows: Numbers) -> Program:
    return Program(program.header, program.rows.take(rows))
