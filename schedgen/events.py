"""Simulations and measured runs as Chrome trace events of one form, which Perfetto opens and `schedgen.measured` reads.

A row a rank, one slice an instruction: what it worked, behind a gap as long as
it waited. Arrows go from a SEND to where its message was there: simulated, its
arrival; measured, where the first to use it starts its work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from schedgen.check.deadlock import waits
from schedgen.check.lives import lives
from schedgen.check.messages import rule_3
from schedgen.check.subject import Subject
from schedgen.file import line_of
from schedgen.program import Instruction, Op, Program, Small
from schedgen.simulate import CAUSES, Simulation, Times

SIMULATED, MEASURED = 0, 1  # pid: the process that a row belongs to
_NAMES = ("simulated", "measured")


class Timeline(NamedTuple):
    """What happened in one walk through the list: microseconds, one entry a row of the projected program."""

    start: Times  # of the work
    length: Times  # of the work
    wait: Times  # before it
    cause: Small  # what it waited for, an index of CAUSES; -1: it did not wait
    arrival: Times  # of SEND rows: when the receiver has the message; -1: nobody needs an arrow


def simulated(program: Program, run: Simulation, unit: float = 1.0) -> Timeline:
    """A simulation as a timeline; `unit`: microseconds of a unit of its time."""
    arrival = np.where(run.arrival > run.start, unit * run.arrival, -1.0)
    return Timeline(unit * run.start, unit * (run.end - run.start), unit * waited(program, run), run.cause, arrival)


def waited(program: Program, run: Simulation) -> Times:
    """How long a rank stood still before each row."""
    before: Times = np.append(0.0, run.end[:-1])
    before[program.bounds[:-1][np.diff(program.bounds) > 0]] = 0.0  # ranks start at zero
    wait: Times = run.start - before
    return wait


def measured(program: Program, start: Times, length: Times, wait: Times, cause: Small) -> list[Timeline]:
    """The timelines of walks that were measured: arrays of shape (walks, rows), as in `Timeline`.

    A rank may come to an instruction, be kept from its core, and find there what was sent meanwhile: an arrow then
    stands upright, in the middle of the instruction.
    """
    subject = Subject(program, "")
    found = lives(subject)
    arrival, sends = np.full(start.shape, -1.0), waits(subject, found, rule_3(subject)).sends
    arrival[:, sends] = np.maximum(start[:, found.used], start[:, sends])
    return [Timeline(*columns) for columns in zip(start, length, wait, cause, arrival, strict=True)]


def events(program: Program, walks: Sequence[Timeline], process: int) -> list[dict[str, Any]]:
    """The events of walks through the list, one after the other; `process`: SIMULATED or MEASURED."""
    table, workers = program.rows, program.header.workers
    found: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": _NAMES[process]}},
        *(
            {"name": "thread_name", "ph": "M", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(workers)
        ),
    ]
    instructions = [program.instruction(row) for row in range(len(program))]
    names, texts = [name(i) for i in instructions], [str(i) for i in instructions]
    line = line_of(program, 0, 0)  # from one rank to the next there are two lines more
    sends = np.flatnonzero(table.op == Op.SEND)
    for walk, times in enumerate(walks):
        columns = (table.rank.tolist(), *(column.tolist() for column in times[:4]))
        for row, (rank, start, length, wait, cause) in enumerate(zip(*columns, strict=True)):
            args = {"instruction": texts[row], "line": line + row + 2 * rank, "walk": walk, "wait": wait}
            if wait:
                args["cause"] = CAUSES[cause]
            event = {"name": names[row], "ph": "X", "pid": process, "tid": rank, "ts": start, "dur": length}
            found.append({**event, "args": args})
        for row in sends[times.arrival[sends] >= 0].tolist():
            number = 2 * (walk * len(program) + row) + process
            one = {"name": texts[row], "cat": "message", "id": number, "pid": process}
            found.append({**one, "ph": "s", "tid": int(table.rank[row]), "ts": float(times.start[row])})
            found.append({**one, "ph": "f", "bp": "e", "tid": int(table.peer[row]), "ts": float(times.arrival[row])})
    return found


def trace(found: Sequence[dict[str, Any]]) -> bytes:
    """The file of events."""
    return json.dumps({"traceEvents": found}).encode()


def name(i: Instruction) -> str:
    """The opcode and what it is about: FWD 0 3, SEND x.0.3, STEP 2."""
    if i.kind > 0:
        return f"{Op(i.op).name} {i.buffer}"
    shard = f"/{i.via}" if i.via >= 0 else ""
    return " ".join([Op(i.op).name, *(str(part) for part in (i.stage, i.mb) if part >= 0)]) + shard
