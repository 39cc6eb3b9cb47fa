"""Timelines of simulations and measured runs as Chrome trace events, which Perfetto opens and `measured_run` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from schedgen.ir.file import line_of
from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.timeline import CAUSES, Timeline

SIMULATED, MEASURED = 0, 1  # pid: the process that events belong to
_PROCESS_NAMES = ("simulated", "measured")


def trace_events(program: Program, timelines: Sequence[Timeline], process: int) -> list[dict[str, Any]]:
    """The events of passes through the program, in microseconds; `process`: SIMULATED or MEASURED.

    Every rank is a thread, every instruction an event with its line, the number of the pass and its wait, and every
    message an arrow.
    """
    table, workers = program.rows, program.header.workers
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": _PROCESS_NAMES[process]}},
        *(
            {"name": "thread_name", "ph": "M", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(workers)
        ),
    ]
    instructions = [program.instruction(row) for row in range(len(program))]
    names, texts = [event_name(i) for i in instructions], [str(i) for i in instructions]
    line = line_of(program, 0, 0)  # each later rank adds two more lines
    sends = program.rows_of(Op.SEND)
    for nth, timeline in enumerate(timelines):
        columns = (table.rank.tolist(), *(column.tolist() for column in timeline[:4]))
        for row, (rank, start, length, wait, cause) in enumerate(zip(*columns, strict=True)):
            args = {"instruction": texts[row], "line": line + row + 2 * rank, "pass": nth, "wait": wait}
            if wait:
                args["cause"] = CAUSES[cause]
            event = {"name": names[row], "ph": "X", "pid": process, "tid": rank, "ts": start, "dur": length}
            events.append({**event, "args": args})
        start, arrival = timeline.start, timeline.arrival
        for row in sends[arrival[sends] >= 0].tolist():
            number = 2 * (nth * len(program) + row) + process
            arrow = {"name": texts[row], "cat": "message", "id": number, "pid": process}
            events.append({**arrow, "ph": "s", "tid": int(table.rank[row]), "ts": float(start[row])})
            events.append({**arrow, "ph": "f", "bp": "e", "tid": int(table.to[row]), "ts": float(arrival[row])})
    return events


def trace_file(events: Sequence[dict[str, Any]]) -> bytes:
    """The events as the bytes of a JSON file."""
    return json.dumps({"traceEvents": events}).encode()


def event_name(i: Instruction) -> str:
    """The opcode and its operand: FWD 0 3, SEND x.0.3, STEP 2."""
    if i.kind != Kind.NONE:
        return f"{Op(i.op).name} {i.buffer}"
    shard = f"/{i.shard}" if i.shard >= 0 else ""
    return " ".join([Op(i.op).name, *(str(part) for part in (i.stage, i.mb) if part >= 0)]) + shard
