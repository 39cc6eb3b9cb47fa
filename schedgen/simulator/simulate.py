"""Simulate a program: execute its lists against a cost model, event by event, to find when each instruction runs.

1. An instruction starts when the one before it on its rank has ended and what it uses has arrived. Compute and STEP
   take their durations, everything else takes no time of its own.
2. A message starts when its SEND and its RECV are both reached and the sender's link out and the receiver's link in
   are free. It takes alpha + beta * bytes. FREE and STEP wait until all messages of their buffer have left.
3. An ALLREDUCE starts when all members have reached it, and takes the time of a ring all-reduce. The sum of a tie also
   waits for the sums that began before it. NORM waits for all ranks and all sums, the STEP of a version for its sum.
   After an exchange between slices its ranks wait until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedgen.analysis import Memory, Waits, analyse
from schedgen.ir.cost import DIRECTION, Amount, by_stage, durations, redo_duration
from schedgen.ir.instructions import COMPUTE, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes, buffer_sizes, message_bytes, summed_bytes
from schedgen.simulator.execution import Listed, Waiting, execute, new_run
from schedgen.simulator.footprint import Footprint, footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.timeline import Timeline
from schedgen.util.arrays import Ints, Numbers, Small, Times


@dataclass(frozen=True, eq=False)
class Simulation:
    """Times in the unit of the costs; arrays by row of the projected program, and by rank."""

    program: Program
    sizes: BufferSizes
    start: Times  # when each row starts
    arrival: Times  # of SEND rows: when the message has arrived; 0 for other rows
    idle: Times  # (workers, len(CAUSES)): time each rank was idle, by cause
    cause: Small  # of rows that waited: what they waited for last, an index of CAUSES; else -1
    lasts: Times  # how long each row takes by itself; of SEND rows: how long the message takes

    @cached_property
    def end(self) -> Times:
        """When each row ends."""
        end: Times = self.start + np.where(self.program.rows.op == Op.SEND, 0.0, self.lasts)
        return end

    @cached_property
    def busy(self) -> Times:
        """By rank: the time that its jobs take."""
        jobs, ranks = self.program.rows_of(*COMPUTE), self.program.header.workers
        return np.bincount(self.program.rows.rank[jobs], (self.end - self.start)[jobs], minlength=ranks).astype(float)

    @cached_property
    def windows(self) -> tuple[Times, Times]:
        """By rank: when its first job starts, and when its last one ends; infinity and 0 if it has none."""
        jobs, ranks = self.program.rows_of(*COMPUTE), self.program.header.workers
        first, last = np.full(ranks, np.inf), np.zeros(ranks)
        np.minimum.at(first, self.program.rows.rank[jobs], self.start[jobs])
        np.maximum.at(last, self.program.rows.rank[jobs], self.end[jobs])
        return first, last

    @property
    def latency(self) -> float:
        """When the last job ends."""
        return float(self.windows[1].max())

    @property
    def bubble(self) -> float:
        """The part of all ranks' time up to the latency that no job takes."""
        return max(0.0, float(1 - self.busy.sum() / (self.latency * self.program.header.workers)))

    @cached_property
    def message_bytes(self) -> Numbers:
        """By row: the bytes of a SEND's message; 0 for other rows."""
        sends, sent = self.program.rows_of(Op.SEND), np.zeros(len(self.program), np.int64)
        sent[sends] = message_bytes(self.program, self.sizes, sends)
        return sent

    @cached_property
    def summed_bytes(self) -> Numbers:
        """By row: the bytes that an ALLREDUCE sums; 0 for other rows."""
        return summed_bytes(self.program, self.sizes)

    @cached_property
    def wait(self) -> Times:
        """By row: how long its rank was idle before it."""
        wait: Times = self.start - self.program.of_row_before(self.end)  # ranks start at zero
        return wait

    @cached_property
    def memory(self) -> Memory:
        """The most bytes of each kind of buffer at once, by rank."""
        return analyse(self.program).lifetimes.peaks(self.sizes.by_kind(self.program.header))

    @cached_property
    def footprint(self) -> Footprint:
        """The bytes that each rank needs."""
        return footprint(self.program, self.sizes)

    def timeline(self, unit: float = 1.0) -> Timeline:
        """The simulation as a timeline; `unit`: microseconds per unit of its time."""
        arrival = np.where(self.program.rows.op == Op.SEND, unit * self.arrival, -1.0)
        return Timeline(unit * self.start, unit * (self.end - self.start), unit * self.wait, self.cause, arrival)


def simulate(program: Program, cost: Mapping[str, Amount], machine: Machine | None = None) -> Simulation:
    """Execute a projected program. `cost`: the duration of each direction, for all stages or by stage.

    `check` must accept the program, which is not proved here: numbers of any other, as of a deadlock, mean nothing.
    UsageError if costs, or the machine's times or sizes, are below 0.
    """
    machine, header, table = machine or Machine(), program.header, program.rows
    machine.check_times()
    sizes = buffer_sizes(machine, header.stages, len(header.graph.edges))
    analysis = analyse(program)
    waits = analysis.waits
    lasts = _durations(program, cost, machine, sizes)
    partner = waits.receiver.copy()
    partner[analysis.messages.receives] = analysis.messages.sends
    listed = Listed(table.op, table.kind, table.operand, program.bounds)
    waiting = Waiting(waits.first, waits.sends, partner, _awaited(program, waits), analysis.lifetimes.send_before)
    run = new_run(program, waits.members)
    rings, free = _rings(program, waits, sizes, machine), machine.alpha == machine.beta == 0
    execute.sized(4 * len(program))(listed, waiting, lasts, rings, free, run)
    np.maximum(run.arrival, 0.0, out=run.arrival)
    return Simulation(program, sizes, run.start, run.arrival, run.idle, run.cause, lasts)


def _durations(program: Program, cost: Mapping[str, Amount], machine: Machine, sizes: BufferSizes) -> Times:
    """By row: how long it takes by itself; for a SEND, how long its message takes."""
    table, header = program.rows, program.header
    duration, sends = np.zeros(len(program)), program.rows_of(Op.SEND)
    duration[sends] = machine.message_times(message_bytes(program, sizes, sends))
    steps = program.rows_of(Op.STEP)
    duration[steps] = machine.step_times(header)[table.stage[steps]]
    lengths = durations(cost, len(header.directions))
    if "I" in lengths:  # a BWD among split backwards
        lengths["B"] = cost["B"] if "B" in cost else lengths["I"] + lengths["W"]
    for op, direction in DIRECTION.items():
        rows = program.rows_of(op)
        if len(rows) == 0:
            continue
        length = redo_duration(cost) if op == Op.RECOMPUTE else lengths[direction]
        duration[rows] = by_stage(length, header.stages)[table.stage[rows]]
    return duration


def _rings(program: Program, waits: Waits, sizes: BufferSizes, machine: Machine) -> Times:
    """By collective: the time of its ring all-reduce, which `execute` does not use for NORM."""
    entered, bytes = program.rows_of(Op.ALLREDUCE), np.zeros(len(waits.members))
    bytes[waits.collective[entered]] = summed_bytes(program, sizes)[entered]
    times: Times = 2 * (waits.members - 1) * (machine.alpha + machine.beta * bytes / np.maximum(waits.members, 1))
    return times


def _awaited(program: Program, waits: Waits) -> Ints:
    """By row: the collective that an ALLREDUCE or NORM enters, or that a STEP waits for; -1: none.

    Where weights have versions and several owners, a STEP waits for the ALLREDUCE before it.
    """
    table, header = program.rows, program.header
    if header.has_flush:
        return waits.collective
    awaited, rows = waits.collective.copy(), program.rows_of(Op.STEP, Op.ALLREDUCE)
    pair = table.rank[rows].astype(np.int64) * header.stages + table.stage[rows]
    rows = rows[np.argsort(pair, kind="stable")]
    before = np.append(-1, awaited[rows[:-1]])
    steps = (table.op[rows] == Op.STEP) & np.array(header.several_owners)[table.stage[rows]]
    awaited[rows[steps]] = before[steps]
    return awaited
