"""When every instruction of a program happens: the list is executed against a cost model, event by event.

1. An instruction starts when the one before it on its rank has ended and what it uses has arrived. Compute and STEP
   take their durations, everything else takes no time of its own.
2. A message starts when its SEND and its RECV are both reached and the sender's link out and the receiver's link in
   are free. It takes alpha + beta * bytes. FREE and STEP wait until all messages of their buffer have left.
3. An ALLREDUCE starts when all members have come to it, and takes what a ring takes. The sum of a tie starts when the
   sums that began before it are done, too. NORM waits for all ranks and all sums, the STEP of a version for its sum.
   Behind an exchange between shards its ranks wait until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedgen.analysis import Memory, Waits, analyse
from schedgen.ir.cost import DIRECTION, Amount, by_stage, durations, redo_duration
from schedgen.ir.instructions import Ints, Kind, Numbers, Op, Small
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes, buffer_sizes, message_bytes, summed_bytes
from schedgen.simulator.footprint import Footprint, footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.timeline import CAUSES, REDUCTION, SEND_CAUSE, Timeline, Times
from schedgen.util.errors import UsageError
from schedgen.util.heap import least_leaf, set_leaf
from schedgen.util.jit import kernel
from schedgen.util.progress import steps


@dataclass(frozen=True, eq=False)
class Simulation:
    """Times in the unit of the costs; arrays by row of the projected program, and by rank."""

    program: Program
    sizes: BufferSizes
    start: Times  # when each row starts ...
    end: Times  # ... and ends
    arrival: Times  # of SEND rows: when the message is there; 0 for other rows
    idle: Times  # (workers, len(CAUSES)): time each rank stood still, by cause
    cause: Small  # of rows that waited: what came last, an index of CAUSES; else -1
    message_bytes: Numbers  # of SEND rows; 0 for other rows
    summed_bytes: Numbers  # of ALLREDUCE rows; 0 for other rows

    @cached_property
    def wait(self) -> Times:
        """By row: how long its rank stood still before it."""
        row_offsets = self.program.bounds
        before = np.append(0.0, self.end[:-1])
        before[row_offsets[:-1][np.diff(row_offsets) > 0]] = 0.0  # ranks start at zero
        wait: Times = self.start - before
        return wait

    @cached_property
    def memory(self) -> Memory:
        """The most bytes of each kind of buffer at once, by rank."""
        return analyse(self.program).lifetimes.peaks(self.sizes.by_kind(self.program.header))

    @cached_property
    def footprint(self) -> Footprint:
        """The bytes that each rank waits."""
        return footprint(self.program, self.sizes)

    def timeline(self, unit: float = 1.0) -> Timeline:
        """The same as a timeline; `unit`: microseconds of a unit of its time."""
        arrival = np.where(self.program.rows.op == Op.SEND, unit * self.arrival, -1.0)
        return Timeline(unit * self.start, unit * (self.end - self.start), unit * self.wait, self.cause, arrival)


def simulate(program: Program, cost: Mapping[str, Amount], machine: Machine | None = None) -> Simulation:
    """Execute a checked, projected program. `cost`: the duration of each direction, for all stages or by stage.

    Raises UsageError where the machine's sizes are too large to be added up.
    """
    machine, header, table = machine or Machine(), program.header, program.rows
    sizes = buffer_sizes(machine, header.stages, len(header.graph.edges))
    _check_sizes(program, sizes)
    sends = np.flatnonzero(table.op == Op.SEND)
    sent, summed = np.zeros(len(program), np.int64), summed_bytes(program, sizes)
    sent[sends] = message_bytes(program, sizes, sends)
    with steps("simulate", 3) as step:
        analysis = analyse(program)
        waits, send_before = step(lambda: analysis.waits), analysis.lifetimes.send_before
        waiting = _Waiting(*waits, send_before, step(_awaited_sums, program, waits.collective))
        times = _Times(
            _durations(program, cost, machine),
            np.where(sent > 0, machine.alpha + machine.beta * sent, 0.0),
            _rings(program, waits, summed, machine),
            machine.has_free_messages,
        )
        listed = _Listed(table.op, table.rank, table.kind, table.peer, program.bounds)
        executed = step(_execute.sized(len(program)), listed, waiting, times, len(CAUSES))
    return Simulation(program, sizes, *executed, sent, summed)


def _check_sizes(program: Program, sizes: BufferSizes) -> None:
    """UsageError where bytes of all buffers at once could exceed 64 bits: no sum of them is 16 times as much."""
    amounts = (sizes.by_kind(program.header), *sizes.workspace.values(), sizes.owned)
    largest = max(int(np.max(amount)) for amount in amounts)
    if largest * (len(program) + program.header.workers) >= 2**59:
        raise UsageError(f"sizes of {largest} bytes are too large for {len(program)} instructions")


def _durations(program: Program, cost: Mapping[str, Amount], machine: Machine) -> Times:
    """By row: how long it takes by itself."""
    table, header = program.rows, program.header
    duration = np.zeros(len(program))
    steps = np.flatnonzero(table.op == Op.STEP)  # of a part of the weights: its part of the time
    duration[steps] = (by_stage(machine.step, header.stages) / header.weight_shards.counts)[table.stage[steps]]
    lengths = durations(cost, len(header.directions))
    unsplit_backward = lengths.get("I", 0) + lengths.get("W", 0)  # of a BWD among split backwards
    for op, direction in DIRECTION.items():
        rows = np.flatnonzero(table.op == op)
        length = redo_duration(cost) if op == Op.RECOMPUTE else lengths.get(direction, unsplit_backward)
        duration[rows] = by_stage(length, header.stages)[table.stage[rows]]
    return duration


def _rings(program: Program, waits: Waits, summed: Numbers, machine: Machine) -> Times:
    """How long each collective takes; `summed`: bytes by row. NORM takes no time."""
    entered, sizes = np.flatnonzero(program.rows.op == Op.ALLREDUCE), np.zeros(len(waits.members))
    sizes[waits.collective[entered]] = summed[entered]
    times: Times = 2 * (waits.members - 1) * (machine.alpha + machine.beta * sizes / np.maximum(waits.members, 1))
    return times


def _awaited_sums(program: Program, collective: Ints) -> Ints:
    """By row: the collective that must be done before the row is; -1: none.

    An exchange is its own; of weights with versions and several owners, STEP has the ALLREDUCE before it.
    """
    table, header = program.rows, program.header
    awaited, exchanges = np.full(len(program), -1, np.int32), program.exchanges()
    awaited[exchanges] = collective[exchanges]
    if header.weight_versions:
        rows = np.flatnonzero((table.op == Op.STEP) | (table.op == Op.ALLREDUCE))
        pair = table.rank[rows].astype(np.int64) * header.stages + table.stage[rows]
        rows = rows[np.argsort(pair, kind="stable")]
        before = np.append(-1, collective[rows[:-1]])
        steps = (table.op[rows] == Op.STEP) & np.array(header.several_owners)[table.stage[rows]]
        awaited[rows[steps]] = before[steps]
    return awaited


class _Listed(NamedTuple):
    """What the execution reads of a program."""

    op: Small
    rank: Ints
    kind: Small
    peer: Ints
    row_offsets: Numbers  # by rank, and the end


class _Waiting(NamedTuple):
    """What rows wait for, apart from the row before: the columns of `Waits`, and two more by row; -1: none."""

    first: Numbers
    sends: Numbers
    receiver: Ints
    collective: Ints
    members: Numbers
    send_before: Ints  # of SEND, FREE and STEP: the SEND of the same buffer before it
    awaited_sum: Ints  # the collective that must be done before the row is


class _Times(NamedTuple):
    """How long things take."""

    duration: Times  # by row
    message: Times  # by SEND row
    ring: Times  # by collective
    free: bool  # messages take no time and wait for nobody


@kernel
def _execute(
    listed: _Listed, waiting: _Waiting, times: _Times, causes: int
) -> tuple[Times, Times, Times, Times, Small]:  # fmt: skip
    """(start, end, arrival, idle, cause) as in `Simulation`.

    Ranks act in the order of their clocks, so that links carry messages in the order of time. A rank that waits for
    what has no time yet sleeps on it: on a SEND's row, or on a collective, numbered behind all rows.
    """
    op, rank, kind, peer, row_offsets = listed
    first, sends, receiver, collective, members, send_before, awaited_sum = waiting
    duration, message, ring, free = times
    rows, workers = len(op), len(row_offsets) - 1
    start, end, arrival = np.zeros(rows), np.zeros(rows), np.full(rows, -1.0)
    idle, cause = np.zeros((workers, causes)), np.full(rows, -1, np.int8)
    sender = np.full(rows, -1, np.int32)
    for row in range(rows):
        if receiver[row] >= 0:
            sender[receiver[row]] = row
    at, clock = row_offsets[:-1].copy(), np.zeros(workers)
    reached = np.zeros(rows, np.bool_)  # of SEND, receiving and collective rows
    out_free, in_free = np.zeros(workers), np.zeros(workers)
    outside, complete = members.copy(), np.zeros(len(members))  # ranks still to come; when the last has, then when done
    # Of the row a rank is at: what it uses or frees that has not left yet, and the last arrival of what has.
    left, sent = first.copy(), send_before.copy()
    last, last_cause = np.full(workers, -1.0), np.full(workers, -1, np.int64)
    reduced = 0.0  # when the last reduction is done
    asleep, next_asleep = np.full(rows + len(members), -1, np.int32), np.full(workers, -1, np.int32)
    leaves = 1
    while leaves < workers:
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)  # by rank: when it acts next
    for r in range(workers):
        set_leaf(tree, leaves + r, 0.0 if at[r] < row_offsets[r + 1] else np.inf)
    while tree[1] < np.inf:
        r, now = least_leaf(tree, leaves), tree[1]
        again = np.inf
        while at[r] < row_offsets[r + 1]:
            row = at[r]
            o, entered, awaited = op[row], collective[row], awaited_sum[row]
            # What it waits for: a SEND or collective that has no time yet, or a time.
            unknown, until, why = -1, clock[r], REDUCTION
            while left[row] < first[row + 1] and arrival[sends[left[row]]] >= 0:
                send = sends[left[row]]
                if arrival[send] > last[r]:
                    last[r], last_cause[r] = arrival[send], kind[send] - 1
                left[row] += 1
            if left[row] < first[row + 1]:
                unknown = sends[left[row]]
            elif receiver[row] < 0 and not free:  # what ends or changes a buffer waits for the SENDs of it
                while sent[row] >= 0 and arrival[sent[row]] >= 0:
                    send = sent[row]
                    if arrival[send] > last[r]:
                        last[r], last_cause[r] = arrival[send], SEND_CAUSE
                    sent[row] = send_before[send]
                unknown = sent[row]
            if last[r] > until:
                until, why = last[r], last_cause[r]
            if entered >= 0 and not reached[row]:
                reached[row] = True
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
            if now > clock[r]:  # woken: it stood still since its clock
                idle[r, why] += now - clock[r]
                cause[row] = why
                clock[r] = now
            start[row] = clock[r]
            clock[r] += duration[row]
            end[row] = clock[r]
            at[r] = row + 1
            last[r] = -1.0
            if receiver[row] >= 0 or sender[row] >= 0:
                reached[row] = True
                send = row if receiver[row] >= 0 else sender[row]
                if arrival[send] < 0 and reached[send] and (free or reached[receiver[send]]):
                    source, to = rank[send], peer[send]
                    begin = start[send] if free else max(now, out_free[source], in_free[to])
                    arrival[send] = out_free[source] = in_free[to] = begin + message[send]
                    _wake(asleep, next_asleep, send, tree, leaves, arrival[send])
            if clock[r] > now:
                again = clock[r]
                break
        set_leaf(tree, leaves + r, again)
    return start, end, np.maximum(arrival, 0.0), idle, cause


@kernel
def _wake(asleep: Ints, next_asleep: Ints, awaited: int, tree: Times, leaves: int, time: float) -> None:
    """The ranks asleep on a row or collective act again at `time`."""
    r = asleep[awaited]
    asleep[awaited] = -1
    while r >= 0:
        set_leaf(tree, leaves + r, time)
        r = next_asleep[r]
