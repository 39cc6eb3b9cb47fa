"""Simulations and measured runs as Chrome trace events of one form, which Perfetto opens and measured_run reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from schedgen.ir.file import line_of
from schedgen.ir.instructions import Instruction, Op
from schedgen.ir.program import Program
from schedgen.simulator.simulate import CAUSES
from schedgen.simulator.timeline import Timeline

_NAMES = ("simulated", "measured")


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
