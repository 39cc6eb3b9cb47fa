"""Events: everything that happens when a list is executed, and what it has to follow.

An event is a row that its rank has come to, a message that is delivered, or a collective that is done. Each has a fixed
set of events that it has to follow, whatever the time anything takes: a marked graph. So the events that happen are the
same in every execution, and one execution, in any order, shows them. All happen unless some follow one another in a
circle. In: a program, its lifetimes and messages, and the transport's rules. Out: the `Events`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import Lifetimes
from schedgen.analysis.messages import Messages
from schedgen.ir.accesses import Accesses
from schedgen.ir.effects import COLLECTIVES, RECEIVERS, SENDERS
from schedgen.ir.program import Program
from schedgen.ir.transport import MESSAGES
from schedgen.util.arrays import AnyInts, Ints, Numbers, stable_order
from schedgen.util.jit import kernel


class Follows(NamedTuple):
    """Events that follow others, one array entry for each pair."""

    before: Ints
    after: Ints
    ahead: AnyInts  # the row that the event before belongs to
    row: AnyInts  # that of the event after, on the same rank
    keeps: bool  # whether this row is behind the other in a list or in a queue


class Events(NamedTuple):
    """The events of a program: its rows, by number, and after them messages and collectives."""

    total: int
    of_row: Ints  # of a SEND, a receive or a collective: its message or collective; of other rows: the row
    follows: tuple[Follows, ...]  # rows of one rank, which come one after another, are the last

    def execute(self, queues: Numbers | None = None) -> Ints:
        """The events that happen, in the order of one execution.

        `queues`: by row the queue of its operation, -1: none. Operations of a queue then go in its order as long as
        something can happen in this order. Where nothing can, the event that has been ready longest overtakes.
        """
        before, after = (np.concatenate([part[k] for part in self.follows]) for k in (0, 1))
        none: Ints = np.zeros(0, np.int32)
        places = none, none, np.zeros(self.total + 1, np.int32), none
        if queues is not None:
            operations = np.flatnonzero(queues >= 0).astype(np.int32)
            order = stable_order(queues[operations])
            in_queue, is_next = operations[order], np.diff(queues[operations[order]]) == 0
            ahead, behind = np.full((2, len(queues)), -1, np.int32)
            ahead[in_queue[1:][is_next]], behind[in_queue[:-1][is_next]] = in_queue[:-1][is_next], in_queue[1:][is_next]
            of_event = operations[stable_order(self.of_row[operations])]
            first = np.searchsorted(self.of_row[of_event], np.arange(self.total + 1)).astype(np.int32)
            places = ahead, behind, first, of_event
        happening, held = np.empty((2, self.total), np.int32)
        happened = _execute.sized(2 * len(before))(
            before, after, np.zeros(self.total + 2, np.int32), np.empty(len(before), np.int32),
            np.zeros((2, self.total), np.int32), self.of_row, *places, happening, held, 0, 0, 0, 0,
        )  # fmt: skip
        return happening[:happened]


def events(
    program: Program, lifetimes: Lifetimes, messages: Messages, collective: Ints, communicator: Numbers | None = None,
    batch: bool = False, touched: Accesses | None = None,
) -> Events:  # fmt: skip
    """The events of a program for which all rules but 3, 4 and 11 are proved, and whose `messages` are complete.

    `collective`: as in `Waits`. `communicator`: by row that of its operation, -1: none, so nothing delays it; None: a
    rank waits at each SEND until it is received, which is the strictest reading of MPI. `batch`: as with +batch.
    `touched`: the accesses, if SENDs and receives need not stay in their places, but among the uses of their buffers.
    """
    rank, rows, first_collective = program.rows.rank, len(program), len(program) + len(messages.sends)
    row = np.arange(rows, dtype=np.int32)
    event, is_operation = row.copy(), program.is_one_of(*MESSAGES, *COLLECTIVES)
    event[messages.sends] = event[messages.receives] = rows + np.arange(len(messages.sends))
    entering = np.flatnonzero(collective >= 0)
    event[entering] = first_collective + collective[entering]
    count = first_collective + int(collective.max(initial=-1)) + 1
    issued, begin, end = row, event, event  # of an operation: it is issued, first of its communicator, done
    if batch and communicator is not None:
        count, issued, begin, end = _batches(program, lifetimes.users, communicator, event, count)
    blocking = is_operation if communicator is None else collective >= 0
    blocking = blocking & ~program.is_one_of(*RECEIVERS)
    passed = np.where(blocking, end, row)  # when the rank goes on behind the row
    operation = np.flatnonzero(is_operation)

    def follow(before: Ints, ahead: AnyInts, after: Ints, behind: AnyInts, keeps: bool = False) -> Follows:
        return Follows(before[ahead], after[behind], ahead, behind, keeps)

    parts = [follow(issued, operation, begin, operation), follow(end, lifetimes.received, row, lifetimes.users)]
    if begin is not end:
        message = program.rows_of(*MESSAGES)
        parts += [follow(begin, message, event, message), follow(event, message, end, message)]
    if communicator is not None:
        ahead, behind = _queues(rank, communicator, begin)
        sends, release = _releases(program, lifetimes.send_before)
        parts += [follow(end, ahead, begin, behind, True), follow(end, sends, row, release)]
    stays = np.arange(rows)
    if touched is not None:
        stays = np.flatnonzero(~program.is_one_of(*MESSAGES))
        used, next_used = _around(program, touched)
        parts.append(follow(row, used, row, next_used))
    next_to = np.flatnonzero(rank[stays[1:]] == rank[stays[:-1]])
    return Events(count, event, (*parts, follow(passed, stays[:-1][next_to], row, stays[1:][next_to], True)))


def _batches(
    program: Program, users: Ints, communicator: Numbers, event: Ints, count: int
) -> tuple[int, Ints, Ints, Ints]:
    """How many events there are with those of batches, and by row when its batch is issued, begins and is done."""
    messages, rank, waits = program.rows_of(*MESSAGES), program.rows.rank, np.zeros(len(program), bool)
    waits[users] = True  # a SEND of what has just been received begins a batch
    joined = (np.diff(messages) == 1) & (np.diff(rank[messages]) == 0) & ~waits[messages[1:]]
    run = np.cumsum(np.append(True, ~joined)[: len(messages)]) - 1
    batch = np.unique(run * (communicator.max(initial=0) + 1) + communicator[messages], return_inverse=True)[1]
    batches = int(batch.max(initial=-1)) + 1
    issued, begin, end = np.arange(len(program), dtype=np.int32), event.copy(), event.copy()
    issued[messages] = messages[np.flatnonzero(np.append(~joined, True)[: len(messages)])][run]
    begin[messages], end[messages] = count + batch, count + batches + batch
    return count + 2 * batches, issued, begin, end


def _queues(rank: Ints, communicator: Numbers, begin: Ints) -> tuple[Numbers, Numbers]:
    """Pairs of operations, the second directly behind the first on one rank and communicator, not in one batch."""
    operations = np.flatnonzero(communicator >= 0)
    queue = rank[operations] * (communicator.max(initial=0) + 1) + communicator[operations]
    order = stable_order(queue)
    ahead, behind = operations[order[:-1]], operations[order[1:]]
    next_to = (np.diff(queue[order]) == 0) & (begin[ahead] != begin[behind])
    return ahead[next_to], behind[next_to]


def _around(program: Program, touched: Accesses) -> tuple[Ints, Ints]:
    """Rows of SENDs and receives with the row before that uses the same buffer, and rows after with theirs."""
    rank, is_message = program.rows.rank[touched.row], program.is_one_of(*MESSAGES)[touched.row]
    order = np.lexsort((touched.row, touched.number, touched.buffer, rank))
    before, after = order[:-1], order[1:]
    same = is_message[before] | is_message[after]
    for column in (touched.number, touched.buffer, rank):
        same &= column[before] == column[after]
    return touched.row[before[same]], touched.row[after[same]]


def _releases(program: Program, send_before: Ints) -> tuple[AnyInts, AnyInts]:
    """Every SEND of a buffer that a later row ends or changes, and that row; `send_before`: as in `Lifetimes`."""
    following = np.full(len(program), -1, np.int32)
    later = np.flatnonzero(send_before >= 0)
    following[send_before[later]] = later
    sends, is_send = np.flatnonzero(following >= 0), program.is_one_of(*SENDERS)
    release = following[sends]
    while (more := is_send[release] & (release >= 0)).any():  # as often as one buffer is sent
        release = np.where(more, following[release], release)
    return sends[release >= 0], release[release >= 0]


@kernel
def _execute(
    before: Ints, after: Ints, first: Ints, following: Ints, missing: Ints, event_of: Ints, ahead: Ints, behind: Ints,
    first_operation: Ints, operations: Ints, order: Ints, held: Ints, at: int, happened: int, waiting: int, let: int,
) -> int:  # fmt: skip
    """Fill `order` with the events that happen, and return how many.

    `first`, zeros: `following[first[e + 1] : first[e + 2]]` becomes what follows event e. `missing`, zeros: by event,
    how many of those that it follows have not happened, and how many of its operations have others `ahead` in their
    queues. `behind` is the opposite of `ahead`. `held`: the events that only others in queues delay, of which `waiting`
    are known and `let` have been asked to overtake. These two, `at` and `happened`: 0.
    """
    events = len(missing[0])
    for k in range(len(before)):
        first[before[k] + 1] += 1
        missing[0, after[k]] += 1
    for row in range(len(ahead)):
        missing[1, event_of[row]] += ahead[row] >= 0
    for event in range(events):
        first[event + 1] += first[event]
    first[events + 1] = len(before)
    for k in range(len(before) - 1, -1, -1):
        first[before[k] + 1] -= 1
        following[first[before[k] + 1]] = after[k]
    for event in range(events):
        if missing[0, event] == 0:
            happened, waiting = _offer(event, missing, order, held, happened, waiting)
    while at < happened or let < waiting:
        if at == happened:
            let += 1
            if missing[0, held[let - 1]] == 0:
                missing[1, held[let - 1]] = 0
                happened, waiting = _offer(held[let - 1], missing, order, held, happened, waiting)
            continue
        event = order[at]
        at += 1
        for k in range(first[event + 1], first[event + 2]):
            missing[0, following[k]] -= 1
            if missing[0, following[k]] == 0:
                happened, waiting = _offer(following[k], missing, order, held, happened, waiting)
        for k in range(first_operation[event], first_operation[event + 1]):
            a, b = ahead[operations[k]], behind[operations[k]]
            if a >= 0:
                behind[a] = b
            if b >= 0:
                ahead[b] = a
                if a < 0:
                    missing[1, event_of[b]] -= 1
                    if missing[1, event_of[b]] == 0 and missing[0, event_of[b]] == 0:
                        happened, waiting = _offer(event_of[b], missing, order, held, happened, waiting)
    return happened


@kernel
def _offer(event: int, missing: Ints, order: Ints, held: Ints, happened: int, waiting: int) -> tuple[int, int]:
    """Let an event happen that follows nothing more, or hold it; return `happened` and `waiting` anew."""
    if missing[1, event] > 0:
        held[waiting] = event
        return happened, waiting + 1
    missing[0, event] = -1
    order[happened] = event
    return happened + 1, waiting
