"""Timelines of simulations and measured runs as Chrome trace events, which Perfetto opens; read again, and summed up.

`mpirun --trace` writes such traces, too. The numbers of a run are its time by worker and cause, and seconds by opcode
and stage; a trace of `schedgen simulate` gives those of the simulation.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.cost import REDO
from schedgen.ir.file import line_of
from schedgen.ir.instructions import COMPUTE, LETTER, Instruction, Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.timeline import CAUSES, Timeline, measured_timelines
from schedgen.util.arrays import Times
from schedgen.util.errors import RefusedFile, clip

SIMULATED, MEASURED = 0, 1  # pid: the process that events belong to
_PROCESS_NAMES = ("simulated", "measured")
MOST = 1e30  # an exclusive bound on times in a trace, in microseconds


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


class _Event(NamedTuple):
    """An instruction as in the trace, with times in microseconds."""

    instruction: str
    start: float  # of its work, after the wait
    length: float
    wait: float
    cause: int  # of the wait, an index of CAUSES; -1: it did not wait


def read_trace(text: str, name: str, program: Program) -> list[Timeline]:
    """The timelines of all passes through the program, of the measured process if there is one, else the simulated one.

    Raises RefusedFile if the text is not a trace of the program: every rank must have executed its list from the first
    line to the last, as often as the others, and some job must have taken time in every pass.
    """
    ranks = _events_by_rank(text, name)
    if max(ranks) >= program.header.workers:
        raise RefusedFile(f"{name}: it has a rank {max(ranks)}, but the schedule has {program.header.workers} workers")
    bounds = program.bounds.tolist()
    first = int(program.ranks_with_rows[0])
    passes = max(1, len(ranks.get(first, ())) // (bounds[first + 1] - bounds[first]))
    columns: list[Times] = []
    for rank in range(program.header.workers):
        events, listed = ranks.get(rank, []), [str(i) for i in program.instructions(rank)]
        for k, (event, instruction) in enumerate(zip(events, listed * passes, strict=False)):
            if event.instruction != instruction:
                line = line_of(program, bounds[rank] + k % len(listed))
                reason = f"{clip(event.instruction)}, but line {line} of the schedule is {instruction}"
                raise RefusedFile(f"{name}: instruction {k + 1} of rank {rank} is {reason}")
        if len(events) != passes * len(listed):
            wanted = f"{passes} times the {len(listed)} of its list"
            raise RefusedFile(f"{name}: rank {rank} has {len(events)} instructions, not {wanted}")
        columns.append(np.array([times for _, *times in events], np.float64).reshape(passes, len(listed), 4))
    start, length, wait, cause = np.moveaxis(np.concatenate(columns, axis=1), 2, 0)
    if not length[:, program.rows_of(*COMPUTE)].any(axis=1).all():
        raise RefusedFile(f"{name}: the jobs of the trace take no time")
    return measured_timelines(program, start, length, wait, cause.astype(np.int8))


def run_numbers(program: Program, passes: Sequence[Timeline]) -> dict[str, Any]:
    """The numbers of one pass through the program, in seconds: means over the timelines of all passes.

    schedgen/docs/reference.md, "Numbers", says what they are; `workers` has busy and idle of each. Raises RefusedFile
    if the jobs' time cannot be told from zero at the precision of the trace's numbers.
    """
    table, workers = program.rows, program.header.workers
    start, length, wait = (1e-6 * np.stack(times) for times in list(zip(*passes, strict=True))[:3])
    cause = np.stack([timeline.cause for timeline in passes])
    begin, end = (start - wait).min(axis=1, keepdims=True), (start + length).max(axis=1, keepdims=True)
    begins, ends = begin.repeat(workers, axis=1), begin.repeat(workers, axis=1)
    listed = program.ranks_with_rows
    first, last = program.bounds[listed], program.bounds[listed + 1] - 1
    begins[:, listed], ends[:, listed] = start[:, first] - wait[:, first], start[:, last] + length[:, last]
    compute = program.is_one_of(*COMPUTE)
    latency = (start + length)[:, compute].max(axis=1) - begin[:, 0]
    if latency.min() <= 0:
        raise RefusedFile("the jobs of the trace take no measurable time")

    def by_rank(amount: Times) -> Times:
        return np.bincount(table.rank, amount.mean(axis=0), minlength=workers).astype(np.float64)

    busy = by_rank(np.where(compute, length, 0.0))
    idle = {name: by_rank(np.where(cause == k, wait, 0.0)) for k, name in enumerate(CAUSES)}
    rest = (ends - begins).mean(axis=0) - busy - np.sum(list(idle.values()), axis=0)
    idle["overhead"] = np.round(rest, 12) + 0.0  # without rounding errors
    idle["begin"] = (begins - begin).mean(axis=0)
    idle["end"] = (end - ends).mean(axis=0)
    mean = length.mean(axis=0)
    return {
        "passes": len(passes),
        "latency": float(latency.mean()),
        "makespan": float((end - begin).mean()),
        "bubble": max(0.0, float(1 - busy.sum() / (latency.mean() * workers))),
        "idle": {name: float(seconds.sum()) for name, seconds in idle.items()},
        "seconds": {op.name: float(mean[table.op == op].mean()) for op in Op if (table.op == op).any()},
        "profile": _profile(program, mean),
        "workers": [
            {"worker": r, "busy": float(busy[r]), "idle": {name: float(seconds[r]) for name, seconds in idle.items()}}
            for r in range(workers)
        ],
    }


def _profile(program: Program, seconds: Times) -> dict[str, list[float]]:
    """Mean seconds by stage of a job of each direction and of a STEP, if there are any; `seconds`: by row.

    A STEP counts all weights of a stage. B is given in addition to I and W if some backwards are whole; for a stage
    with whole backwards only, I and W are half of B each. R is given in addition to F if forwards are redone.
    """
    table, header = program.rows, program.header

    def mean(op: Op) -> Times:
        """Mean seconds of an instruction, by stage; NaN for stages that have none."""
        rows = program.rows_of(op)
        total = np.bincount(table.stage[rows], seconds[rows], minlength=header.stages)
        with np.errstate(invalid="ignore"):
            by_stage: Times = total / np.bincount(table.stage[rows], minlength=header.stages)
        return by_stage

    def filled(means: Times, others: Times) -> Times:
        return np.where(np.isnan(means), others, means)

    ops, whole = set(np.unique(table.op).tolist()), mean(Op.BWD)
    of_direction = {name: op for op, name in LETTER.items()}
    means = {name: mean(of_direction[name]) for name in header.directions}
    if "I" in means and Op.BWD in ops:
        means |= {half: filled(means[half], whole / 2) for half in "IW"}
        means["B"] = filled(whole, means["I"] + means["W"])
    if Op.RECOMPUTE in ops:
        means[REDO] = filled(mean(Op.RECOMPUTE), means["F"])
    if Op.STEP in ops:
        means["step"] = mean(Op.STEP) * header.weight_shards.counts
    return {name: times.tolist() for name, times in means.items()}


def _events_by_rank(text: str, name: str) -> dict[int, list[_Event]]:
    """The instructions of every rank in the order of the file; RefusedFile if that is no trace."""
    ranks: dict[int, list[_Event]] = defaultdict(list)
    try:
        events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
        process = MEASURED if any(event["pid"] == MEASURED for event in events) else SIMULATED
        for event in (event for event in events if event["pid"] == process):
            args = event["args"]
            start, length, wait = float(event["ts"]), float(event["dur"]), float(args["wait"])
            cause = CAUSES.index(args["cause"]) if wait else -1
            if event["tid"] < 0 or not (abs(start) < MOST and 0 <= length < MOST and 0 <= wait < MOST):
                raise ValueError
            ranks[event["tid"]].append(_Event(str(args["instruction"]), start, length, wait, cause))
        if not ranks:
            raise ValueError
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
        raise RefusedFile(f"{name}: not a trace that mpirun --trace or schedgen simulate --trace wrote") from None
    return ranks
