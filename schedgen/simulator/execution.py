"""The execution of a program, event by event: the loop in which `simulate` spends its time.

In: the list, what its rows wait for and how long rows and collectives take, as arrays. Out: a `Run`, filled in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.timeline import CAUSES, REDUCTION, SEND_CAUSE
from schedgen.util.arrays import Ints, Numbers, Small, Times
from schedgen.util.heap import least_leaf, set_leaf
from schedgen.util.jit import kernel


class Listed(NamedTuple):
    """What the execution reads from a program."""

    op: Small
    kind: Small
    other_end: Ints
    row_offsets: Numbers  # by rank, and the end


class Waiting(NamedTuple):
    """What each row waits for besides the row before it, -1: nothing. `first` and `sends` are as in `Waits`."""

    first: Ints
    sends: Ints
    partner: Ints  # of a SEND: the RECV or FETCH_W; of these: the SEND
    collective: Ints  # of ALLREDUCE and NORM: the one they enter; of STEP: the one it waits for
    send_before: Ints  # of SEND, FREE and STEP: the SEND of the same buffer before it


class Run(NamedTuple):
    """State and results of the execution, allocated by NumPy, which asks the system for huge pages for large arrays."""

    start: Times  # by row, as in `Simulation`
    arrival: Times  # of SEND rows; -1 until it is known
    idle: Times
    cause: Small
    asleep: Ints  # by row, and after all rows by collective: the first rank that sleeps on it; -1: none
    complete: Times  # by collective: when its last member has reached it, then when it is done
    outside: Numbers  # by collective: how many members are still to come
    # By rank.
    next_asleep: Ints  # the next rank that sleeps on the same; -1: none
    at: Numbers  # the row that it is at
    came: Numbers  # the last row with which it reached a collective
    clock: Times
    out_free: Times  # when its links are free: out, and in
    in_free: Times
    left: Numbers  # index in `sends`: the first message that its row uses and that may not have arrived
    sent: Numbers  # of the buffer that its row frees or changes: a SEND that may not have arrived; -1: none
    last: Times  # the latest arrival of those that have arrived, and why the row waited for it
    last_cause: Numbers
    tree: Times  # leaf by rank: when it acts next


def new_run(program: Program, members: Numbers) -> Run:
    """The state before anything has happened. `members`: how many ranks enter each collective."""
    rows, workers, collectives = len(program), program.header.workers, len(members)
    leaves = 1 << max(workers - 1, 0).bit_length()
    return Run(
        start=np.zeros(rows),
        arrival=np.full(rows, -1.0),
        idle=np.zeros((workers, len(CAUSES))),
        cause=np.full(rows, -1, np.int8),
        asleep=np.full(rows + collectives, -1, np.int32),
        complete=np.zeros(collectives),
        outside=members.copy(),
        next_asleep=np.full(workers, -1, np.int32),
        at=program.bounds[:-1].copy(),
        came=np.full(workers, -1),
        clock=np.zeros(workers),
        out_free=np.zeros(workers),
        in_free=np.zeros(workers),
        left=np.zeros(workers, np.int64),
        sent=np.full(workers, -1),
        last=np.full(workers, -1.0),
        last_cause=np.full(workers, -1),
        tree=np.full(2 * leaves, np.inf),
    )


@kernel
def execute(listed: Listed, waiting: Waiting, lasts: Times, ring: Times, free: bool, run: Run) -> None:
    """Fill in `run`. `ring`: the time of each collective; `free`: messages take no time, wait for no receive or link.

    Ranks act in the order of their clocks, so that links carry messages in the order of time. A rank that waits for
    something whose time is not known yet sleeps on it: on a SEND's row, or on a collective, numbered after all rows.
    """
    op, kind, other_end, row_offsets = listed
    first, sends, partner, collective, send_before = waiting
    (
        start, arrival, idle, cause, asleep, complete, outside, next_asleep, at, came, clock, out_free, in_free,
        left, sent, last, last_cause, tree,
    ) = run  # fmt: skip
    rows, workers, leaves = len(op), len(row_offsets) - 1, len(tree) // 2
    for r in range(workers):
        if at[r] < row_offsets[r + 1]:
            left[r], sent[r] = first[at[r]], send_before[at[r]]
            set_leaf(tree, leaves + r, 0.0)
    reduced = 0.0  # when the last reduction is done
    while tree[1] < np.inf:
        r, now = least_leaf(tree, leaves), tree[1]
        again = np.inf
        while at[r] < row_offsets[r + 1]:
            row = at[r]
            o, entered, awaited = op[row], collective[row], -1
            if o == Op.STEP or (o == Op.ALLREDUCE and (kind[row] == Kind.X or kind[row] == Kind.G)):
                awaited = entered
            if o == Op.STEP:
                entered = -1
            # What the row waits for: a SEND or collective whose time is not known yet, or a time.
            unknown, until, why = -1, clock[r], REDUCTION
            while left[r] < first[row + 1] and arrival[sends[left[r]]] >= 0:
                send = sends[left[r]]
                if arrival[send] > last[r]:
                    last[r], last_cause[r] = arrival[send], kind[send] - 1
                left[r] += 1
            if left[r] < first[row + 1]:
                unknown = sends[left[r]]
            elif o != Op.SEND and not free:  # a row that ends or changes a buffer waits for its SENDs
                while sent[r] >= 0 and arrival[sent[r]] >= 0:
                    send = sent[r]
                    if arrival[send] > last[r]:
                        last[r], last_cause[r] = arrival[send], SEND_CAUSE
                    sent[r] = send_before[send]
                unknown = sent[r]
            if last[r] > until:
                until, why = last[r], last_cause[r]
            if entered >= 0 and came[r] != row:
                came[r] = row
                outside[entered] -= 1
                complete[entered] = max(complete[entered], clock[r])
                if outside[entered] == 0:
                    all_there = complete[entered]
                    if o == Op.ALLREDUCE:
                        begin = max(all_there, reduced) if kind[row] == Kind.T else all_there
                        complete[entered] = begin + ring[entered]
                    if awaited != entered:
                        reduced = max(reduced, complete[entered])
                    _wake(asleep, next_asleep, rows + entered, tree, leaves, all_there)
            if o == Op.NORM:  # waits for every rank, and all of them have started their reductions
                if outside[entered] > 0:
                    unknown = rows + entered
                elif reduced > until:
                    until, why = reduced, REDUCTION
            if awaited >= 0:
                if outside[awaited] > 0:
                    unknown = rows + awaited
                elif complete[awaited] > until:
                    until, why = complete[awaited], REDUCTION
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
            if o != Op.SEND:
                clock[r] += lasts[row]
            at[r] = row + 1
            last[r] = -1.0
            if row + 1 < row_offsets[r + 1]:
                sent[r] = send_before[row + 1]
            other = partner[row]
            if other >= 0:
                is_send, met = o == Op.SEND, at[other_end[row]] > other
                send, source, to = (row, r, other_end[row]) if is_send else (other, other_end[row], r)
                if arrival[send] < 0 and (met or (free and is_send)):
                    begin = start[send] if free else max(now, out_free[source], in_free[to])
                    arrival[send] = out_free[source] = in_free[to] = begin + lasts[send]
                    _wake(asleep, next_asleep, send, tree, leaves, arrival[send])
            if clock[r] > now:
                again = clock[r]
                break
        set_leaf(tree, leaves + r, again)


@kernel
def _wake(asleep: Ints, next_asleep: Ints, awaited: int, tree: Times, leaves: int, time: float) -> None:
    """Wake the ranks asleep on a row or collective, to act again at `time`."""
    r = asleep[awaited]
    asleep[awaited] = -1
    while r >= 0:
        set_leaf(tree, leaves + r, time)
        r = next_asleep[r]
