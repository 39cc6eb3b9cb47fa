"""What a measured step comes to: time by worker and cause, seconds by opcode and stage.

It reads the traces of `mpirun --trace`. Those of `schedgen simulate --trace` have
the same form and give the same numbers as the simulation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from schedgen.analysis.subject import Numbers
from schedgen.ir.cost import DIRECTION
from schedgen.ir.file import line_of
from schedgen.ir.instructions import COMPUTE, Op
from schedgen.ir.program import Program
from schedgen.simulator.simulate import CAUSES, Times
from schedgen.simulator.timeline import MEASURED, SIMULATED, Timeline
from schedgen.simulator.timeline import measured as timelines
from schedgen.util.errors import RefusedFile, clip

MOST = 1e30  # microseconds: so long takes nothing
NEAR = 1e-3  # microseconds by which rounding may make instructions overlap


def read_trace(text: str, name: str, program: Program) -> list[Timeline]:
    """Every walk through the list: of the measured process of a trace, or, where it has none, of the simulated one.

    Raises RefusedFile where it is no trace of the program: every rank must have
    executed its list from the first line to the last, as often as the others.
    """
    ranks = _slices(text, name, program.header.workers)
    bounds = program.bounds.tolist()
    walks = len(ranks[0]) // (bounds[1] - bounds[0])
    columns: list[Any] = []
    for rank, found in enumerate(ranks):
        listed = [str(i) for i in program.instructions(rank)]
        for at, (said, *_) in enumerate(found):
            if said != listed[at % len(listed)]:
                line = line_of(program, bounds[rank] + at % len(listed))
                reason = f"{clip(said)}, but line {line} of the schedule is {listed[at % len(listed)]}"
                raise RefusedFile(f"{name}: instruction {at + 1} of rank {rank} is {reason}")
        if len(found) != max(walks, 1) * len(listed):
            raise RefusedFile(
                f"{name}: rank {rank} has {len(found)} instructions, not {max(walks, 1)} times the {len(listed)} of "
                "its list"
            )
        times = np.array([numbers for _, *numbers in found], np.float64).reshape(walks, len(listed), 4)
        end = (times[..., 0] + times[..., 1]).ravel()
        early = np.flatnonzero((times[..., 0] - times[..., 2]).ravel()[1:] < end[:-1] - NEAR - 1e-9 * end[:-1])
        if len(early):
            at = int(early[0]) + 1
            raise RefusedFile(
                f"{name}: instruction {at + 1} of rank {rank}, {found[at][0]}, begins before the one before it ends"
            )
        columns.append(times)
    start, length, wait, cause = np.moveaxis(np.concatenate(columns, axis=1), 2, 0)
    return timelines(program, start, length, wait, cause.astype(np.int8))


def measured(program: Program, walks: Sequence[Timeline]) -> dict[str, Any]:
    """The numbers of a walk through the list, in seconds, means over all walks.

    latency   from the first instruction's start to the end of the last job
    makespan  ... to the end of the last instruction
    bubble    idle fraction of workers x latency, as in simulate
    idle      by cause; with busy it makes up workers x makespan. Beside simulate's causes: overhead, what is neither
              computing nor waiting; begin, before a rank's first instruction; end, behind its last
    seconds   of an instruction of each opcode, waits left out
    profile   of a job of each direction and of a STEP by stage, as `simulate --profile` reads it

    Per worker: busy and idle.
    """
    table, workers = program.rows, program.header.workers
    start, length, wait = (1e-6 * np.stack(times) for times in list(zip(*walks, strict=True))[:3])
    cause = np.stack([walk.cause for walk in walks])
    first, last = program.bounds[:-1], program.bounds[1:] - 1
    begins, ends = start[:, first] - wait[:, first], start[:, last] + length[:, last]
    begin, end = begins.min(axis=1, keepdims=True), ends.max(axis=1, keepdims=True)
    compute = np.isin(table.op, COMPUTE)
    latency = (start + length)[:, compute].max(axis=1) - begin[:, 0]
    if latency.min() <= 0:
        raise RefusedFile("the jobs of the trace take no time")

    def by_rank(amount: Times) -> Times:
        summed: Times = np.add.reduceat(amount, first, axis=1).mean(axis=0)
        return summed

    busy = by_rank(np.where(compute, length, 0.0))
    idle = {words: by_rank(np.where(cause == i, wait, 0.0)) for i, words in enumerate(CAUSES)}
    rest = (ends - begins).mean(axis=0) - busy - np.sum(list(idle.values()), axis=0)
    idle["overhead"] = np.round(rest, 12) + 0.0  # where there is none, it is not what rounding leaves
    idle["begin"] = (begins - begin).mean(axis=0)
    idle["end"] = (end - ends).mean(axis=0)
    mean = length.mean(axis=0)
    return {
        "walks": len(walks),
        "latency": float(latency.mean()),
        "makespan": float((end - begin).mean()),
        "bubble": max(0.0, float(1 - busy.sum() / (latency.mean() * workers))),
        "idle": {words: float(seconds.sum()) for words, seconds in idle.items()},
        "seconds": {op.name: float(mean[table.op == op].mean()) for op in Op if (table.op == op).any()},
        "profile": profile(program, mean),
        "workers": [
            {"worker": r, "busy": float(busy[r]), "idle": {words: float(of[r]) for words, of in idle.items()}}
            for r in range(workers)
        ],
    }


def profile(program: Program, seconds: Times) -> dict[str, list[float]]:
    """Mean seconds of a job of each direction and of a STEP, by stage; `seconds`: of each row of the program.

    Where a schedule splits backwards, a stage whose own are all whole has half of one as I and half as W.
    """
    table, stages = program.rows, program.header.stages
    found = {}

    def mean(rows: Numbers, weight: float | Times = 1.0) -> list[float]:
        total = np.bincount(table.stage[rows], weight * seconds[rows], minlength=stages)
        means: list[float] = (total / np.bincount(table.stage[rows], minlength=stages)).tolist()
        return means

    for direction in program.header.directions:
        ops = [op for op, one in DIRECTION.items() if one == direction]
        rows = np.flatnonzero(np.isin(table.op, ops))
        weight = np.ones(len(rows))
        if direction in ("I", "W"):
            halves = np.bincount(table.stage[rows], minlength=stages) > 0
            whole = np.flatnonzero((table.op == Op.BWD) & ~halves[table.stage])
            rows, weight = np.append(rows, whole), np.append(weight, np.full(len(whole), 0.5))
        found[direction] = mean(rows, weight)
    return {**found, "step": mean(np.flatnonzero(table.op == Op.STEP))}


def _slices(text: str, name: str, workers: int) -> list[list[tuple[str, float, float, float, float]]]:
    """By rank, in the order of the file: instruction, start, length, wait in microseconds, cause."""
    try:
        whole = json.loads(text)
        every = whole["traceEvents"] if isinstance(whole, dict) else None
        events = [one for one in every or () if one["ph"] == "X"]
        process = MEASURED if any(one["pid"] == MEASURED for one in events) else SIMULATED
        events = [one for one in events if one["pid"] == process]
    except (ValueError, RecursionError, KeyError, TypeError):
        events = []
    if not events:
        raise RefusedFile(f"{name}: not a trace that mpirun --trace or schedgen simulate --trace wrote")
    ranks: list[list[tuple[str, float, float, float, float]]] = [[] for _ in range(workers)]
    for number, event in enumerate(events, start=1):
        try:
            rank, args = event["tid"], event["args"]
            said, times = args["instruction"], (event["ts"], event["dur"], args["wait"])
            cause = CAUSES.index(args["cause"]) if times[2] else -1
            sound = type(rank) is int and type(said) is str and all(type(time) in (int, float) for time in times)
            if not (sound and abs(times[0]) < MOST and 0 <= times[1] < MOST and 0 <= times[2] < MOST):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise RefusedFile(
                f"{name}: instruction {number} lacks a rank, a time, a wait or its cause, or has a wrong one"
            ) from None
        if not 0 <= rank < workers:
            raise RefusedFile(f"{name}: it has a rank {clip(str(rank))}, but the schedule has {workers} workers")
        ranks[rank].append((said, *times, cause))
    return ranks
