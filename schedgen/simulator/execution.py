"""The execution of a program, event by event: the loop in which `simulate` spends its time.

Every link on which a message waits has a time, `due`, when it is free. A rank that acts or waits has one in `tree`. The
least of all times is next, links before ranks. A rank is in one of four states:

    acts    it takes the row that it is `at`, and goes on until a row takes time or has to wait
    waits   the row can start at a time that is known, which `clock` says
    sleeps  the row needs a message or a collective whose time is not known yet: the rank is in the list that begins at
            `asleep` of that SEND or collective, and whoever makes the time known wakes all ranks in it
    ended   it has no rows left

A message is ready once its SEND and its receive are reached, a sum once all members have reached it: then its parts,
one for each link, are messages with one link each. When links become free, the first messages that wait there
(`link_queues.py`) are looked at again, in the order in which they were ready: each starts, or waits at another link.

In: the list, what its rows wait for, how long rows take and what messages occupy, as arrays. Out: a `Run`, filled in.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.link_queues import Queues, make_ready, new_queues, set_due, take_turn
from schedgen.simulator.network import Paths, Sums
from schedgen.simulator.timeline import CAUSES, OFFLOAD_CAUSE, REDUCTION, SEND_CAUSE
from schedgen.util.arrays import Ints, Numbers, Small, Times
from schedgen.util.heap import least_leaf, set_leaf
from schedgen.util.jit import kernel


class Listed(NamedTuple):
    """What the execution reads from a program."""

    op: Small
    kind: Small
    other_end: Ints  # of SEND, RECV and FETCH_W: the other rank; of OFFLOAD and RELOAD: their own
    row_offsets: Numbers  # by rank, and the end


class Waiting(NamedTuple):
    """What each row waits for besides the row before it, -1: nothing. `first` and `sends` are as in `Waits`."""

    first: Ints
    sends: Ints
    partner: Ints  # of a SEND: the RECV or FETCH_W; of these: the SEND; of OFFLOAD and RELOAD: itself
    collective: Ints  # of ALLREDUCE and NORM: the one they enter; of STEP: the one it waits for
    send_before: Ints  # of SEND, FREE and STEP: the SEND of the same buffer before it


class Run(NamedTuple):
    """State and results of the execution, allocated by NumPy, which asks the system for huge pages for large arrays."""

    start: Times  # by row, as in `Simulation`
    arrival: Times  # by message, as in `Queues`: when it, or a part, has arrived; -1 until it is known
    idle: Times
    cause: Small
    asleep: Ints  # by row, and after all rows by collective: the first rank that sleeps on it; -1: none
    complete: Times  # by collective: when its last member has reached it, then when it is done
    outside: Numbers  # by collective: how many members are still to come, and parts still to start
    # Of shape (1,):
    unknown_sums: Numbers  # how many sums have parts still to start
    reduced: Times  # when the last of the others is done
    norm: Numbers  # the NORM that a rank has reached; -1: none
    queues: Queues
    # By rank.
    next_asleep: Ints  # the next rank that sleeps on the same; -1: none
    at: Numbers  # the row that it is at
    came: Numbers  # the last row with which it reached a collective
    clock: Times
    left: Numbers  # index in `sends`: the first message that its row uses and that may not have arrived
    sent: Numbers  # of the buffer that its row frees or changes: a SEND that may not have arrived; -1: none
    latest: Times  # of what its row waits for and has arrived: the latest arrival ...
    latest_cause: Numbers  # ... and what it was: an index of CAUSES
    tree: Times  # a tournament tree: when each rank acts again


def new_run(program: Program, members: Numbers, paths: Paths, sums: Sums, links: int) -> Run:
    """The state before anything has happened. `members`: how many ranks enter each collective."""
    rows, workers, collectives, messages = len(program), program.header.workers, len(members), len(paths.turns)
    leaves = 1 << max(workers - 1, 0).bit_length()
    return Run(
        start=np.zeros(rows),
        arrival=np.full(messages, -1.0),
        idle=np.zeros((workers, len(CAUSES))),
        cause=np.full(rows, -1, np.int8),
        asleep=np.full(rows + collectives, -1, np.int32),
        complete=np.zeros(collectives),
        outside=members + np.diff(sums.first),
        unknown_sums=np.zeros(1, np.int64),
        reduced=np.zeros(1),
        norm=np.full(1, -1),
        queues=new_queues(paths, links),
        next_asleep=np.full(workers, -1, np.int32),
        at=program.bounds[:-1].copy(),
        came=np.full(workers, -1),
        clock=np.zeros(workers),
        left=np.zeros(workers, np.int64),
        sent=np.full(workers, -1),
        latest=np.full(workers, -1.0),
        latest_cause=np.full(workers, -1),
        tree=np.full(2 * leaves, np.inf),
    )


@kernel
def execute(
    listed: Listed, waiting: Waiting, lasts: Times, paths: Paths, sums: Sums, free: bool, horizon: float, run: Run
) -> None:
    """Fill in `run` with what happens before the time `horizon`. `free`: messages take no time, wait for nothing.

    Ranks act in the order of their clocks, so that links carry messages in the order of time. In `asleep` collectives
    are numbered after all rows.
    """
    op, kind, other_end, row_offsets = listed
    first, sends, partner, collective, send_before = waiting
    (
        start, arrival, idle, cause, asleep, complete, outside, unknown_sums, reduced, norm, queues,
        next_asleep, at, came, clock, left, sent, latest, latest_cause, tree,
    ) = run  # fmt: skip
    rows, workers, leaves, due, next_link = len(op), len(row_offsets) - 1, len(tree) // 2, queues.due, queues.next_link
    for r in range(workers):
        if at[r] < row_offsets[r + 1]:
            left[r], sent[r] = first[at[r]], send_before[at[r]]
            set_leaf(tree, leaves + r, 0.0)
    while min(tree[1], due[next_link[1]]) < horizon:
        link = next_link[1]
        if due[link] <= tree[1]:
            now, message = due[link], queues.waiting[link]
            if queues.free_at[link] <= now:
                queues.waiting[link] = queues.next_waiting[message]
                if take_turn(message, now, paths, queues):
                    if message < rows:
                        arrival[message] = now + lasts[message]
                        _wake(asleep, next_asleep, message, tree, arrival[message])
                    else:
                        _sum_part(message, now, paths, sums, run)
            set_due(link, now, queues)
            continue
        r, now = least_leaf(tree, leaves), tree[1]
        again = inf  # when the rank acts again: never, if it sleeps or ends
        while at[r] < row_offsets[r + 1]:
            row = at[r]
            # The collective that the row enters, and the one that has to be done before it, if any. A STEP enters none.
            o, entered, awaited = op[row], collective[row], -1
            starts = o == Op.SEND or partner[row] == row  # a message or copy; it takes no time of the rank
            if o == Op.STEP or (o == Op.ALLREDUCE and (kind[row] == Kind.X or kind[row] == Kind.G)):
                awaited = entered
            if o == Op.STEP:
                entered = -1
            # 1. What the row waits for: a SEND or collective whose time is not known yet, or a time and its cause.
            unknown, until, why = -1, clock[r], REDUCTION
            while left[r] < first[row + 1] and arrival[sends[left[r]]] >= 0:
                send = sends[left[r]]
                if arrival[send] > latest[r]:
                    latest[r] = arrival[send]
                    latest_cause[r] = OFFLOAD_CAUSE if kind[send] >= Kind.SAVED else kind[send] - 1
                left[r] += 1
            if left[r] < first[row + 1]:
                unknown = sends[left[r]]
            elif not starts and not free:  # a row that ends or changes a buffer waits for its SENDs
                while sent[r] >= 0 and arrival[sent[r]] >= 0:
                    send = sent[r]
                    if arrival[send] > latest[r]:
                        latest[r] = arrival[send]
                        latest_cause[r] = OFFLOAD_CAUSE if kind[send] >= Kind.SAVED else SEND_CAUSE
                    sent[r] = send_before[send]
                unknown = sent[r]
            if latest[r] > until:
                until, why = latest[r], latest_cause[r]
            # 2. Enter the collective, once; the last member to come makes the parts of a sum ready.
            if entered >= 0 and came[r] != row:
                came[r] = row
                outside[entered] -= 1
                complete[entered] = max(complete[entered], clock[r])
                parts, end = sums.first[entered], sums.first[entered + 1]
                if outside[entered] == end - parts:
                    if end > parts:
                        unknown_sums[0] += 1
                    for part in range(parts, end):
                        if make_ready(rows + part, now, paths, queues):
                            _sum_part(rows + part, now, paths, sums, run)
                    if end == parts:  # NORM, or a sum that occupies no link
                        if o == Op.ALLREDUCE:
                            complete[entered] += sums.latency[entered]
                            reduced[0] = max(reduced[0], complete[entered])
                        _wake(asleep, next_asleep, rows + entered, tree, now)
            if o == Op.NORM:  # waits for every rank and every sum, and then for the exchange of the step's numbers
                norm[0] = entered
                if outside[entered] > 0 or unknown_sums[0] > 0:
                    unknown = rows + entered
                else:
                    done = max(reduced[0], complete[entered]) + sums.latency[entered]
                    if done > until:
                        until, why = done, REDUCTION
            if awaited >= 0:
                if outside[awaited] > 0:
                    unknown = rows + awaited
                elif complete[awaited] > until:
                    until, why = complete[awaited], REDUCTION
            # 3. Sleep, wait, or run.
            if unknown >= 0:
                next_asleep[r] = asleep[unknown]
                asleep[unknown] = r
                break
            if until > now:
                idle[r, why] += until - clock[r]
                cause[row] = why
                clock[r] = again = until
                break
            if now > clock[r]:  # woken: it was idle since clock[r]
                idle[r, why] += now - clock[r]
                cause[row] = why
                clock[r] = now
            start[row] = clock[r]
            if not starts:
                clock[r] += lasts[row]
            at[r] = row + 1
            latest[r] = -1.0
            if row + 1 < row_offsets[r + 1]:
                sent[r] = send_before[row + 1]
            # 4. A message is ready once both its ends have started.
            other = partner[row]
            if other >= 0:
                met, send = at[other_end[row]] > other, row if starts else other
                is_ready = arrival[send] < 0 and (starts if free else met)
                if is_ready and (free or make_ready(send, now, paths, queues)):
                    arrival[send] = now + lasts[send]
                    _wake(asleep, next_asleep, send, tree, arrival[send])
            if clock[r] > now:
                again = clock[r]
                break
        set_leaf(tree, leaves + r, again)


@kernel
def _sum_part(message: int, now: float, paths: Paths, sums: Sums, run: Run) -> None:
    """The last turn of a part of a sum has started: if it is the last part, whoever waits for the sum may go on."""
    rows = len(run.start)
    c = sums.collective[message - rows]
    run.arrival[message] = now + paths.hold[paths.first[message]]
    run.complete[c] = max(run.complete[c], run.arrival[message])
    run.outside[c] -= 1
    if run.outside[c] == 0:
        run.complete[c] += sums.latency[c]
        run.reduced[0] = max(run.reduced[0], run.complete[c])
        run.unknown_sums[0] -= 1
        _wake(run.asleep, run.next_asleep, rows + c, run.tree, now)
        if run.unknown_sums[0] == 0 and run.norm[0] >= 0:
            _wake(run.asleep, run.next_asleep, rows + run.norm[0], run.tree, now)


@kernel
def _wake(asleep: Ints, next_asleep: Ints, awaited: int, tree: Times, time: float) -> None:
    """Wake the ranks asleep on a row or collective, to act again at `time`."""
    r = asleep[awaited]
    asleep[awaited] = -1
    while r >= 0:
        set_leaf(tree, len(tree) // 2 + r, time)
        r = next_asleep[r]
