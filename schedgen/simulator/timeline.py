"""A timeline: when every instruction of one pass through a list began, what it waited for and how long.

It comes from a simulation or a measured run, and is used for time breakdowns, pictures and trace files.

A time breakdown says where every rank's time goes, and why it is idle. The time of a rank, from the first instruction
of all ranks to the last, is divided into `SHARES`; `MEANING` explains them. A wait has up to two parts: until the last
SEND that it waits for starts (for NORM: until the last rank arrives), which is warm-up, dependency or cool-down, and
from then on, which is transfer or sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis import Waits, analyse
from schedgen.ir.instructions import COMPUTE, KIND_WORDS, Op
from schedgen.ir.program import Program
from schedgen.util.arrays import Numbers, Small, Times

# Why a rank is idle: it waits for a message of a kind, for one of its own to leave, for other ranks, for what is
# offloaded or lent to leave or come back.
CAUSES = (*KIND_WORDS.values(), "send", "reduction", "offload")
SEND_CAUSE, REDUCTION, OFFLOAD_CAUSE = map(CAUSES.index, CAUSES[-3:])  # the causes before are Kind - 1


class Timeline(NamedTuple):
    """Times in microseconds, or in units of the costs; one entry a row of the projected program."""

    start: Times  # of the work
    length: Times  # of the work
    wait: Times  # before it
    cause: Small  # what it waited for, an index of CAUSES; -1: it did not wait
    arrival: Times  # of SEND rows: when the receiver has the message; -1: other rows, and messages that no row uses


def measured_timelines(program: Program, start: Times, length: Times, wait: Times, cause: Small) -> list[Timeline]:
    """The timelines of measured passes: arrays of shape (passes, rows), as in `Timeline`.

    A message arrives when the first row that uses it starts its work. A rank may reach an instruction, lose its core
    for a while, and then find what was sent meanwhile: that message arrives when it is sent.
    """
    analysis, arrival = analyse(program), np.full(start.shape, -1.0)
    arrival[:, analysis.waits.sends] = np.maximum(start[:, analysis.lifetimes.users], start[:, analysis.waits.sends])
    return [Timeline(*columns) for columns in zip(start, length, wait, cause, arrival, strict=True)]


SHARES = ("busy", "warm-up", "dependency", "cool-down", "transfer", "send", "offload", "sum", "step", "overhead")
MEANING = (
    "its jobs",
    "before its first job: what this job needs has not been sent",
    "between its jobs: what the next one needs has not been sent",
    "after its last job: what it waits for has not been sent, or only others have work left",
    "what it waits for has been sent and has not arrived yet",
    "a buffer cannot be freed or stepped until a message sent from it has left",
    "what a forward saved is on its way to the memory of the host or to another rank, or back",
    "all ranks of a sum, or all at NORM, have arrived, and sums are under way",
    "optimizer steps",
    "neither computing nor waiting: other instructions of a measured run",
)
BUSY, WARM_UP, DEPENDENCY, COOL_DOWN, TRANSFER, SEND, OFFLOAD, SUM, STEP, OVERHEAD = range(len(SHARES))


class TimeBreakdown(NamedTuple):
    """The breakdown, in the unit of the timeline; arrays by row of the projected program unless stated otherwise."""

    time: Times  # (workers, len(SHARES)): each row adds up to makespan
    begin: float  # of the first instruction of all
    makespan: float  # from `begin` to the end of the last instruction
    until: Times  # when the first part of the wait before the row ends; the wait is from start - wait to start
    early: Small  # what the first part counts as, an index of SHARES ...
    late: Small  # ... and what the second
    awaited: Numbers  # the SEND whose message the row waited for last; -1: none


def time_breakdown(program: Program, timeline: Timeline) -> TimeBreakdown:
    """Account for all time of one pass through a checked, projected program."""
    waits, table = analyse(program).waits, program.rows
    begin, awaited = timeline.start - timeline.wait, _last_to_come(waits, timeline)
    until = _first_part(waits, timeline, awaited)
    jobs = program.rows_of(*COMPUTE)
    early = _early(program, jobs)
    own = {SEND_CAUSE: SEND, REDUCTION: SUM, OFFLOAD_CAUSE: OFFLOAD}
    late = np.select([timeline.cause == cause for cause in own], list(own.values()), TRANSFER)

    share = np.full(len(program), OVERHEAD)
    share[jobs], share[table.op == Op.STEP] = BUSY, STEP
    lengths = np.concatenate([timeline.length, until - begin, timeline.start - until])
    entry = np.tile(table.rank * len(SHARES), 3) + np.concatenate([share, early, late])
    time = np.bincount(entry, lengths, program.header.workers * len(SHARES)).reshape(-1, len(SHARES)).astype(float)
    bounds, ranks = program.bounds, program.ranks_with_rows
    begins, ends = begin[bounds[ranks]], (timeline.start + timeline.length)[bounds[ranks + 1] - 1]
    origin, finish = float(begins.min()), float(ends.max())
    time[ranks, WARM_UP] += begins - origin
    after = np.full(len(time), finish - origin)  # by rank: after its last row
    after[ranks] = finish - ends
    time[:, COOL_DOWN] += after
    rest = finish - origin - time.sum(axis=1)  # gaps between measured instructions, or rounding
    time[:, OVERHEAD] += np.where(rest > 1e-9 * (finish - origin), rest, 0.0)
    return TimeBreakdown(time, origin, finish - origin, until, early.astype(np.int8), late.astype(np.int8), awaited)


def _first_part(waits: Waits, timeline: Timeline, awaited: Numbers) -> Times:
    """By row: when what it waits for is sent, or the last rank enters its sum, clipped to its wait."""
    begin = timeline.start - timeline.wait
    until = begin.copy()
    message = (timeline.cause >= 0) & (timeline.cause < SEND_CAUSE) & (awaited >= 0)
    until[message] = timeline.start[awaited[message]]
    entering = np.flatnonzero(waits.collective >= 0)
    entered = np.full(len(waits.members), -np.inf)  # when the last member arrives
    np.maximum.at(entered, waits.collective[entering], begin[entering])
    at_sum = entering[timeline.cause[entering] == REDUCTION]
    until[at_sum] = entered[waits.collective[at_sum]]
    return np.clip(until, begin, timeline.start)


def _early(program: Program, jobs: Numbers) -> Numbers:
    """By row: the share that the first part of its wait counts as; `jobs`: the rows that compute."""
    rank, row = program.rows.rank, np.arange(len(program))
    first, last = program.bounds[1:].copy(), program.bounds[:-1] - 1  # rows of each rank's first and last job
    np.minimum.at(first, rank[jobs], jobs)
    np.maximum.at(last, rank[jobs], jobs)
    early = np.where(row <= first[rank], WARM_UP, DEPENDENCY)
    return np.where(row > last[rank], COOL_DOWN, early)


def _last_to_come(waits: Waits, timeline: Timeline) -> Numbers:
    """By row: of the SENDs whose messages it is the first to use, the one that arrives last; -1: none."""
    awaited, count = np.full(len(timeline.start), -1), np.diff(waits.first)
    awaited[count > 0] = waits.sends[waits.first[1:][count > 0] - 1]
    users = np.repeat(np.arange(len(count)), count)
    several = np.flatnonzero(count[users] > 1)
    row, sends = users[several], waits.sends[several]
    start = timeline.start[sends]
    order = np.lexsort((start, np.maximum(timeline.arrival[sends], start), row))
    awaited[row[order]] = sends[order]  # the last one of a row stays
    return awaited
