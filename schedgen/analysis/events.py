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
from schedgen.ir.effects import COLLECTIVES, RECEIVERS, SENDERS
from schedgen.ir.program import Program
from schedgen.ir.transport import MESSAGES
from schedgen.util.arrays import AnyInts, Ints, Numbers
from schedgen.util.jit import kernel
from schedgen.util.sort import stable_order


class Follows(NamedTuple):
    """Events that follow others, one array entry for each pair."""

    before: Ints
    after: Ints
    ahead: AnyInts  # the row that the event before belongs to
    row: AnyInts  # that of the event after, on the same rank
    keeps: bool  # whether this row is behind the other in a list or in a queue


class Events(NamedTuple):
    """The events of a program: its rows, by number, and after them messages and collectives."""

    count: int
    of_row: Ints  # of a SEND, a receive or a collective: its message or collective; of other rows: the row
    follows: tuple[Follows, ...]  # rows of one rank, which come one after another, are the last

    def execute(self) -> Numbers:
        """The events that happen, in the order of one execution."""
        before, after = (np.concatenate([part[k] for part in self.follows]) for k in (0, 1))
        order = np.empty(self.count, np.int32)
        happened = _execute.sized(2 * len(before))(
            before, after, np.zeros(self.count + 2, np.int32), np.empty(len(before), np.int32),
            np.zeros(self.count, np.int32), order, 0, 0,
        )  # fmt: skip
        return order[:happened]


def events(
    program: Program, lifetimes: Lifetimes, messages: Messages, collective: Ints, communicator: Numbers | None = None,
    batch: bool = False,
) -> Events:  # fmt: skip
    """The events of a program for which all rules but 3, 4 and 11 are proved, and whose `messages` are complete.

    `collective`: as in `Waits`. `communicator`: by row that of its operation, -1: none, so nothing delays it; None: a
    rank waits at each SEND until it is received, which is the strictest reading of MPI. `batch`: as with +batch.
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
        count, issued, begin, end = _batches(program, communicator, event, count)
    blocking = is_operation if communicator is None else collective >= 0
    blocking = blocking & ~program.is_one_of(*RECEIVERS)
    passed = np.where(blocking, end, row)  # when the rank goes on behind the row
    operation = np.flatnonzero(is_operation)

    def follow(before: Ints, ahead: AnyInts, after: Ints, behind: AnyInts, keeps: bool = False) -> Follows:
        return Follows(before[ahead], after[behind], ahead, behind, keeps)

    parts = [
        follow(issued, operation, begin, operation),
        follow(end, lifetimes.received, row, lifetimes.users),
    ]
    if begin is not end:
        message = program.rows_of(*MESSAGES)
        parts += [follow(begin, message, event, message), follow(event, message, end, message)]
    if communicator is not None:
        ahead, behind = _queues(rank, communicator, begin)
        sends, release = _releases(program, lifetimes.send_before)
        parts += [follow(end, ahead, begin, behind, True), follow(end, sends, row, release)]
    later = np.flatnonzero(rank[1:] == rank[:-1]) + 1
    return Events(count, event, (*parts, follow(passed, later - 1, row, later, True)))


def _batches(program: Program, communicator: Numbers, event: Ints, count: int) -> tuple[int, Ints, Ints, Ints]:
    """How many events there are with those of batches, and by row when its batch is issued, begins and is done."""
    messages, rank = program.rows_of(*MESSAGES), program.rows.rank
    joined = (np.diff(messages) == 1) & (np.diff(rank[messages]) == 0)
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


def _releases(program: Program, send_before: Ints) -> tuple[Numbers, Numbers]:
    """Every SEND of a buffer that is ended or changed later, and the row that does so; `send_before`: of `Lifetimes`."""
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
    before: Ints, after: Ints, first: Ints, following: Ints, missing: Ints, order: Ints, at: int, happened: int
) -> int:  # fmt: skip
    """Fill `order` with the events that happen, and return how many.

    `first`, zeros: `following[first[e + 1] : first[e + 2]]` becomes what follows event e. `missing`, zeros: by event,
    how many of those that it follows have not happened. `at` and `happened`: 0.
    """
    for k in range(len(before)):
        first[before[k] + 1] += 1
        missing[after[k]] += 1
    for event in range(len(missing)):
        first[event + 1] += first[event]
        if missing[event] == 0:
            order[happened] = event
            happened += 1
    first[len(missing) + 1] = len(before)
    for k in range(len(before) - 1, -1, -1):
        first[before[k] + 1] -= 1
        following[first[before[k] + 1]] = after[k]
    while at < happened:
        event = order[at]
        at += 1
        for k in range(first[event + 1], first[event + 2]):
            missing[following[k]] -= 1
            if missing[following[k]] == 0:
                order[happened] = following[k]
                happened += 1
    return happened
