"""Repair: the order of messages in which a list is safe on a transport that delivers in order, jobs left in place.

The list is executed with messages that nothing but their own SEND and receive delays. Where a communicator's
operations can happen in the order of the list, they do; where nothing can happen, one that could overtakes. This gives
all events one order. On each rank the operations of a communicator are then brought into this order, by moving some of
them down, none further than directly behind one that comes before it. So a row never moves beyond what waits for it,
and no event has to follow a later one. With +batch, all messages of a rank are brought into the order of its events, so
that a batch holds nothing that happens only after what its rank does next.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.analysis.events import events
from schedgen.checker.deadlock import executed, refuse_circle
from schedgen.checker.proof import Proof
from schedgen.ir.effects import SENDERS
from schedgen.ir.instructions import Kind
from schedgen.ir.program import Program
from schedgen.ir.transport import MESSAGES, Communicator, Transport, communicators, in_queue_order, queues
from schedgen.util.arrays import Numbers
from schedgen.util.errors import RefusedFile


class Repaired(NamedTuple):
    """A program with its messages in another order."""

    program: Program
    moved: Numbers  # rows of the program as it was ...
    behind: Numbers  # ... and the row that each of them is now behind; -1: none
    in_place: bool  # whether the list as it was ends where only its own SEND and receive delay a message


def repair(program: Program, name: str, transport: Transport) -> Repaired:
    """The program with messages moved so that rule 4 holds on the transport.

    All rules but 3, 4 and 11 must be proved, and every SEND must have its receive. RefusedFile, which calls the file
    `name`, if jobs wait for one another wherever the messages stand.
    """
    analysis, rank, row = analyse(program), program.rows.rank.astype(np.int64), np.arange(len(program))
    queue, is_message = queues(program, transport), program.is_one_of(*MESSAGES)
    collective, free = analysis.waits.collective, np.full(len(program), -1)
    # First with MPI's strictest delivery: a list that is safe there stays so. At last with messages in any place.
    for communicator, touched in ((None, None), (free, None), (free, analysis.accesses)):
        all = events(program, analysis.lifetimes, analysis.named, collective, communicator, touched=touched)
        happened = all.execute(queue)
        if len(happened) == all.total:
            break
    else:
        refuse_circle(Proof(program, name), all, happened)
    turn = np.empty(all.total, np.int64)
    turn[happened] = np.arange(all.total)
    at, last = turn[all.of_row], np.where(is_message, -1, row)
    if touched is not None:
        new = np.lexsort((at, rank))
        behind, was = np.maximum.accumulate(last[new])[np.argsort(new)], np.maximum.accumulate(last)
        moved = np.flatnonzero(is_message & (behind != was))
        return Repaired(Program(program.header, program.rows.take(new)), moved, behind[moved], False)
    ordered, queue = (row, rank) if transport.batch else (np.flatnonzero(queue >= 0), queue)
    order = ordered[np.lexsort((at[ordered], queue[ordered]))]
    behind = row.copy()
    behind[order] = in_queue_order(order, queue[order])
    moved = np.flatnonzero(behind != row)
    reordered = Program(program.header, program.rows.take(np.lexsort((at, behind))))
    return Repaired(reordered, moved, behind[moved], True)


class Fewest(NamedTuple):
    """Communicators with which a list is safe as it is."""

    found: list[Communicator]
    needed: int  # a lower bound


def fewest(program: Program, name: str) -> Fewest:
    """Few communicators, each of some directed edges and kinds of buffers, with which rule 4 holds in order.

    Any two edges and kinds that cannot share a communicator, even if all others have their own, need two: a clique of
    them is a lower bound. Each edge and kind, those of the clique first, gets the first communicator that it can share.
    RefusedFile if not even one for each edge and kind is enough.
    """
    separate = communicators(program, Transport("", "edge-kind"))
    rows, table = program.rows_of(*MESSAGES), program.rows
    _, first, kind_of_edge = np.unique(separate[rows], return_index=True, return_inverse=True)

    def safe(number: Numbers) -> bool:
        carried = np.where(separate < 0, -1, separate + len(first))
        carried[rows] = number[kind_of_edge]
        met, all, happened = executed(program, carried)
        return met.complete and len(happened) == all.total

    number = np.arange(len(first))
    if not safe(number):
        raise RefusedFile(f"{name}: no communicators make this list safe: schedgen repair --transport moves messages")
    ends = [(int(table.rank[row]), int(table.operand[row])) for row in rows[first]]
    apart = np.zeros((len(first), len(first)), bool)
    for a, b in combinations(range(len(first)), 2):
        apart[a, b] = apart[b, a] = not {*ends[a]}.isdisjoint(ends[b]) and not safe(np.where(number == b, a, number))
    clique: list[int] = []
    for each in np.argsort(-apart.sum(axis=0), kind="stable").tolist():
        if apart[each, clique].all():
            clique.append(each)
    number, found = number + len(first), 0  # those found are below
    for each in [*clique, *(k for k in range(len(first)) if k not in clique)]:
        for number[each] in range(found + 1):
            if number[each] == found or safe(number):
                break
        found = max(found, int(number[each]) + 1)
    sent = program.is_one_of(*SENDERS)[rows[first]].tolist()
    kinds = [Kind(kind) for kind in table.kind[rows[first]].tolist()]
    edges = [((a, b) if out else (b, a)) + (kind,) for (a, b), out, kind in zip(ends, sent, kinds, strict=True)]
    return Fewest(
        [Communicator(tuple(edges[k] for k in np.flatnonzero(number == one))) for one in range(found)], len(clique)
    )
