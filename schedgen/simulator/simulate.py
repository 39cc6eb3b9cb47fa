"""Simulate a program: execute its lists against a cost model, event by event, to find when each instruction runs.

1. An instruction starts when the one before it on its rank has ended and what it uses has arrived. Compute and STEP
   take their durations, everything else takes no time of its own.
2. A message is ready when its SEND and its RECV are both reached. It occupies the links of its path (`network`): its
   sender's link out, its receiver's link in, the cards between; and it starts when all of them are free. Of the ready
   messages whose path is free the one that was ready first starts. So a busy receiver holds up no other message of its
   sender. Connections share a card: what crosses one does so in turns, each at most 1/8 as long as the longest message
   that does, and waits for the next behind all that are ready. Those of one path cross it one after another. FREE and
   STEP wait until all messages of their buffer have arrived. OFFLOAD and RELOAD are messages to and from the host,
   which are ready at once.
3. An ALLREDUCE is ready when all members have reached it. It is the messages that the runtime sends, gathered into one
   part for each link and card: of the bytes that cross it, each in the queue of that link. It is done when its last
   part is, and two latencies later: the parts are sent, and then the totals. NORM waits for all ranks and all sums, and
   exchanges a few numbers; the STEP of a version waits for its sum. After an exchange between slices its ranks wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedgen.analysis import Memory, Waits, analyse
from schedgen.ir.cost import DIRECTION, Amount, by_stage, durations, redo_duration
from schedgen.ir.effects import COLLECTIVES, COPIES
from schedgen.ir.instructions import COMPUTE, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes, buffer_sizes, message_bytes, summed_bytes
from schedgen.simulator.execution import Listed, Waiting, execute, new_run
from schedgen.simulator.footprint import Footprint, footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import Links, LinkUse, Paths, Sums
from schedgen.simulator.timeline import Timeline
from schedgen.util.arrays import Ints, Numbers, Small, Times
from schedgen.util.errors import UsageError

MESSAGES = (Op.SEND, *COPIES)  # what occupies links


@dataclass(frozen=True, eq=False)
class Simulation:
    """Times in the unit of the costs; arrays by row of the projected program, and by rank."""

    program: Program
    sizes: BufferSizes
    start: Times  # when each row starts
    arrival: Times  # of rows of `MESSAGES`: when the message or copy has arrived; 0 for other rows
    idle: Times  # (workers, len(CAUSES)): time each rank was idle, by cause
    cause: Small  # of rows that waited: what they waited for last, an index of CAUSES; else -1
    lasts: Times  # how long each row takes by itself; of rows of `MESSAGES`: how long the message or copy takes
    machine: Machine
    parts: Times  # by part of a sum: when it has crossed its link
    turn: Times  # by turn of messages that have several: when it begins

    @cached_property
    def end(self) -> Times:
        """When each row ends."""
        end: Times = self.start + np.where(self.program.is_one_of(*MESSAGES), 0.0, self.lasts)
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
    def makespan(self) -> float:
        """When the last instruction ends."""
        return float(self.end.max())

    @property
    def bubble(self) -> float:
        """The part of all ranks' time up to the latency that no job takes."""
        return max(0.0, float(1 - self.busy.sum() / (self.latency * self.program.header.workers)))

    @cached_property
    def message_bytes(self) -> Numbers:
        """By row: the bytes of a SEND's message, or of a copy; 0 for other rows."""
        sends, sent = self.program.rows_of(*MESSAGES), np.zeros(len(self.program), np.int64)
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

    @property
    def lack(self) -> str:
        """The rank that needs most beyond the memory of its device, in words; empty if all fit."""
        need, network = self.footprint.peak, self.machine.network
        has = network.by_rank(network.memory, len(need))
        r = int((need - has).argmax())
        return "" if need[r] <= has[r] else f"rank {r} needs {need[r]} bytes; its device has {has[r]:.0f}"

    def link_use(self, unit: float = 1.0) -> LinkUse:
        """What occupies links and cards, and when; `unit`: as for `timeline`."""
        program, waits = self.program, analyse(self.program).waits
        links = Links(self.machine.network, program.header.workers)
        paths, sums = _paths(program, waits, self.sizes, links, self.lasts.copy())
        message = np.repeat(np.arange(len(paths.turns)), np.diff(paths.first))
        place = np.repeat(np.arange(len(message)), paths.turns[message])  # on a path: an entry for every turn
        nth = np.arange(len(place)) - np.searchsorted(place, place)
        message, hold = message[place], paths.hold[place]
        row = np.concatenate([np.arange(len(program)), _entries(program, waits)[sums.collective]])[message]
        is_part, shared = message >= len(program), paths.turns[message] > 1
        start = np.concatenate([self.arrival - self.lasts, self.parts])[message] - np.where(is_part, hold, 0.0)
        start[shared] = self.turn[paths.first_turn[message[shared]] + nth[shared]]
        used, link = np.unique(paths.link[place], return_inverse=True)
        order, names = np.lexsort((start, link)), [links.names[k] for k in used]
        return LinkUse(names, link[order], row[order], unit * start[order], unit * hold[order])

    def timeline(self, unit: float = 1.0) -> Timeline:
        """The simulation as a timeline; `unit`: microseconds per unit of its time."""
        arrival = np.where(self.program.is_one_of(*MESSAGES), unit * self.arrival, -1.0)
        return Timeline(unit * self.start, unit * (self.end - self.start), unit * self.wait, self.cause, arrival)


def simulate(program: Program, cost: Mapping[str, Amount] | None = None, machine: Machine | None = None) -> Simulation:
    """Execute a projected program: when each instruction starts and ends.

    cost     the duration of each direction, for all stages or by stage; default: the schedule's own
    machine  links and sizes, in the unit of the costs and in bytes; default: messages take no time

    `check` must accept the program, which is not proved here: numbers of any other, as of a deadlock, mean nothing.
    UsageError if costs or sizes are below 0, or a host has too little memory for what is offloaded to it.
    """
    simulation = simulate_until(np.inf, program, cost, machine)
    assert simulation is not None
    return simulation


def simulate_until(
    until: float, program: Program, cost: Mapping[str, Amount] | None = None, machine: Machine | None = None
) -> Simulation | None:
    """As `simulate`, but None if instructions are still to start at the time `until`."""
    machine, header, table = machine or Machine(), program.header, program.rows
    cost = header.cost if cost is None else cost
    sizes = buffer_sizes(machine, header.stages, len(header.graph.edges))
    analysis = analyse(program)
    waits, lasts = analysis.waits, _durations(program, cost, machine)
    partner = waits.receiver.copy()
    partner[analysis.named.receives] = analysis.named.sends
    copies, other_end = program.rows_of(*COPIES), table.operand.copy()
    partner[copies], other_end[copies] = copies, table.rank[copies]
    listed = Listed(table.op, table.kind, other_end, program.bounds)
    waiting = Waiting(waits.first, waits.sends, partner, _awaited(program, waits), analysis.lifetimes.send_before)
    links = Links(machine.network, header.workers)
    paths, sums = _paths(program, waits, sizes, links, lasts)
    run = new_run(program, waits.members, paths, sums, links.count)
    last_turns = paths.from_last_turn(lasts)
    execute.sized(4 * len(program))(listed, waiting, last_turns, paths, sums, links.is_free, until, run)
    if (run.at < program.bounds[1:]).any():
        return None
    np.maximum(run.arrival, 0.0, out=run.arrival)
    arrival, parts = np.split(run.arrival, [len(program)])
    turn = run.queues.turn
    simulation = Simulation(program, sizes, run.start, arrival, run.idle, run.cause, lasts, machine, parts, turn)
    if len(copies) and machine.network.host.memory < np.inf:
        needed, host = simulation.footprint.host, machine.network.host
        on_hosts = np.add.reduceat(needed, np.arange(0, len(needed), host.devices))
        for k in np.flatnonzero(on_hosts > host.memory)[:1].tolist():
            last = min((k + 1) * host.devices, len(needed)) - 1
            ranks, offloaded = f"ranks {k * host.devices} to {last}", on_hosts[k]
            raise UsageError(f"{ranks} offload {offloaded} bytes to their host, which has {host.memory:g}")
    return simulation


def _durations(program: Program, cost: Mapping[str, Amount], machine: Machine) -> Times:
    """By row: how long a job or STEP takes on its rank's device; 0 for other rows."""
    table, header = program.rows, program.header
    duration, speed = np.zeros(len(program)), machine.network.by_rank(machine.network.speed, header.workers)
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
    return duration if (speed == 1).all() else duration / speed[table.rank]


def _entries(program: Program, waits: Waits) -> Numbers:
    """By collective: the first row that enters it."""
    rows = program.rows_of(*COLLECTIVES)
    return rows[np.unique(waits.collective[rows], return_index=True)[1]]


def _paths(program: Program, waits: Waits, sizes: BufferSizes, links: Links, lasts: Times) -> tuple[Paths, Sums]:
    """What every message and copy and, after all rows, every part of a sum occupies; fills in how long these last."""
    table, sends = program.rows, program.rows_of(*MESSAGES)[: 0 if links.is_free else None]
    is_reload, ends = table.op[sends] == Op.RELOAD, (table.rank[sends], table.to[sends])  # of a copy `to` is HOST
    source, to = np.where(is_reload, ends[::-1], ends)
    sent, lasts[sends] = links.messages(source, to, message_bytes(program, sizes, sends))
    rows = _entries(program, waits)
    groups, group = np.unique(table.group[rows], return_inverse=True)
    sums = [links.sum_of(program.header.groups[k]) for k in groups]
    size, is_norm = summed_bytes(program, sizes)[rows], table.op[rows] == Op.NORM
    latency = np.array(
        [sums[k].exchange if norm else sums[k].latency(n) for k, n, norm in zip(group, size, is_norm, strict=True)]
    )
    # Each collective's parts are those of its group, for its bytes.
    link = np.concatenate([np.zeros(0, np.int32), *(each.link for each in sums)])
    hold = np.concatenate([np.zeros(0), *(each.hold for each in sums)])
    parts = np.array([len(each.link) for each in sums], np.int64)
    begin, count = (np.cumsum(parts) - parts)[group], parts[group] * (size > 0)
    first = np.concatenate([[0], np.cumsum(count)])
    part = np.arange(first[-1]) + np.repeat(begin - first[:-1], count)
    links_before = np.zeros(len(program) + len(part) + 1, np.int32)  # first, after each message: how many it occupies
    links_before[1 + sends], links_before[1 + len(program) :] = np.diff(sent.first), 1
    paths = Paths(
        np.cumsum(links_before, out=links_before),
        np.concatenate([sent.link, link[part]]),
        np.concatenate([sent.hold, hold[part] * np.repeat(size, count)]),
        np.ones(len(program) + len(part), np.int8),
    )
    return links.in_turns(paths), Sums(first, np.repeat(np.arange(len(rows), dtype=np.int32), count), latency)


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
