"""The numbers of a schedule: the seed's Table 1, per worker and in all.

Times come from `simulate`, in which messages take no time, as the seed
assumes ("we assume that transmission latencies can be hidden").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from schedgen.analysis.subject import Subject
from schedgen.checker import check
from schedgen.checker.weight_versions import staleness
from schedgen.ir.cost import DIRECTION, Amount
from schedgen.ir.instructions import COMPUTE, KIND_NAME, KIND_WORDS, Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.cost import Machine
from schedgen.simulator.lower_bounds import bounds
from schedgen.simulator.simulate import simulate


def stats(program: Program, cost: Mapping[str, Amount] | None = None, machine: Machine | None = None) -> dict[str, Any]:
    """All numbers of a projected program, in the units of `cost` (default: the file's); bytes if `machine` gives sizes.

    latency            when the last job ends
    throughput         jobs per worker per unit of time [Rahimi 2025, "Definition: throughput"]
    bubble             idle fraction of workers x latency
    bounds             what the latency cannot be below: see `schedgen.simulator.lower_bounds`
    gap                latency over the largest of them, minus 1: 0 is the best possible
    own_window_bubble  largest over workers of last end - first start - busy, in time
    peak_activations   largest over workers of the saved forwards alive at once
    messages           SENDs in all; collectives are counted apart
    exchanges          where stages have shards: the collectives that add up what these give; also per worker
    versions           where weights change without a flush, by stage: the most versions an owner holds
    staleness          and the most updates between the weights that a gradient was computed with and those it changes

    Per worker: busy time; weight_storage, stages owned, parts of one as
    fractions; weight_receives, copies (or parts of them) fetched;
    weight_uses_away_from_home, the seed's count of jobs whose
    weights live elsewhere; activation_receives, the seed's count of inputs
    that travel: activations forwards and their gradients backwards;
    gradient_receives, partial weight gradients received; receives, the same
    messages by kind; peak_memory, buffers alive at once by kind. With `machine`,
    in all (the largest) and per worker: peak_bytes, the memory a worker needs,
    and memory_bytes, the most bytes of each kind at once.
    """
    header, table = program.header, program.rows
    memory = check(program)
    cost = header.cost if cost is None else cost
    times = simulate(program, cost, (machine or Machine())._replace(alpha=0.0, beta=0.0))
    compute = np.flatnonzero(np.isin(table.op, COMPUTE))
    worker = table.rank[compute]
    start, end = times.start[compute], times.end[compute]
    busy = np.bincount(worker, end - start, minlength=header.workers)
    begins, ends = np.full(header.workers, np.inf), np.zeros(header.workers)
    np.minimum.at(begins, worker, start)
    np.maximum.at(ends, worker, end)
    latency = float(end.max())
    divided = np.array(
        [not more and len(ranks) > 1 for ranks, more in zip(header.owners, header.several_owners, strict=True)]
    )
    elsewhere = (header.weights != header.compute) | divided[:, None]
    away = np.bincount(header.compute[elsewhere], minlength=header.workers)
    stored = np.zeros(header.workers)
    for stage, via in header.weight_shards.units:
        stored[list(header.weight_shards.holders(stage, via))] += 1 / len(header.weight_shards.parts(stage))
    receives = {
        words: np.bincount(
            table.rank[((table.op == Op.RECV) | (table.op == Op.FETCH_W)) & (table.kind == kind)],
            minlength=header.workers,
        )
        for kind, words in KIND_WORDS.items()
    }
    exchanges = program.exchanges()
    exchanged = np.bincount(table.rank[exchanges], minlength=header.workers)
    jobs = header.compute.size
    limits = bounds(header, cost, int(memory.saved.sum()))
    numbers: dict[str, Any] = {
        "scheme": dict(header.scheme),
        "latency": _plain(latency),
        "throughput": jobs / (latency * header.workers),
        "bubble": max(0.0, float(1 - busy.sum() / (latency * header.workers))),
        "bounds": {name: _plain(limit) for name, limit in limits.items()},
        "gap": latency / max(limits.values()) - 1,
        "own_window_bubble": _plain(float(np.max((ends - begins - busy)[np.isfinite(begins)]))),
        "peak_activations": int(memory.saved.max()),
        "mean_peak_activations": float(memory.saved.mean()),
        "messages": int((table.op == Op.SEND).sum()),
        "collectives": int(len(header.groups) and _collectives(program)),
        **(
            {} if header.tensor_parallel.degree == 1 else {"exchanges": len(exchanges) // header.tensor_parallel.degree}
        ),
        "instructions": len(program),
        "workers": [
            {
                "worker": rank,
                "busy": _plain(float(busy[rank])),
                "peak_activations": int(memory.saved[rank]),
                "weight_storage": _plain(round(float(stored[rank]), 9)),
                "weight_receives": int(receives["weight"][rank]),
                "weight_uses_away_from_home": int(away[rank]),
                "activation_receives": int(receives["activation"][rank] + receives["gradient"][rank]),
                "gradient_receives": int(receives["weight_gradient"][rank]),
                "receives": {words: int(count[rank]) for words, count in receives.items()},
                **({} if header.tensor_parallel.degree == 1 else {"exchanges": int(exchanged[rank])}),
                "peak_memory": {kind: int(peak[rank]) for kind, peak in memory._asdict().items()},
            }
            for rank in range(header.workers)
        ],
    }
    if header.weight_versions.count:
        numbers["versions"], numbers["staleness"] = staleness(Subject(program, ""))
    if machine is not None:
        peak = times.footprint.peak
        kinds = {**times.memory._asdict(), "places": times.footprint.places, "owned": times.footprint.owned}
        numbers["peak_bytes"] = int(peak.max())
        numbers["memory_bytes"] = {kind: int(most.max()) for kind, most in kinds.items()}
        for rank, worker in enumerate(numbers["workers"]):
            worker["peak_bytes"] = int(peak[rank])
            worker["memory_bytes"] = {kind: int(most[rank]) for kind, most in kinds.items()}
    return numbers


def _collectives(program: Program) -> int:
    rows = np.flatnonzero((program.rows.op == Op.ALLREDUCE) | (program.rows.op == Op.NORM))
    sizes = np.array([len(group) for group in program.header.groups])
    return round(float((1 / sizes[program.rows.peer[rows]]).sum()))


class Cycle(NamedTuple):
    """The jobs that start together."""

    time: int | float
    jobs: list[tuple[str, int, int]]  # direction, stage, microbatch; by worker

    def __str__(self) -> str:
        return f"{_short(self.time):9} {', '.join(f'{d}({s}, {b})' for d, s, b in self.jobs)}"


def cycles(program: Program, cost: Mapping[str, Amount] | None = None) -> list[Cycle]:
    """The clock cycles of a checked, projected program, which are all times when a job starts.

    Messages take no time. Where all jobs take one unit, as GPipe's forwards
    do, these are the cycles that its authors count. A whole backward among
    split ones is B; a RECOMPUTE is a part of its backward.
    """
    table, cost = program.rows, program.header.cost if cost is None else cost
    run = simulate(program, cost)
    rows = np.flatnonzero(np.isin(table.op, COMPUTE) & (table.op != Op.RECOMPUTE))
    start = run.start[rows]
    order = np.lexsort((rows, start))
    shortest = float((run.end[rows] - start).min())
    first = np.flatnonzero(np.append(True, np.diff(start[order]) > 1e-6 * shortest))  # no rounding makes two of one
    found = []
    for together in np.split(rows[order], first[1:]):
        columns = (column[np.sort(together)].tolist() for column in (table.op, table.stage, table.mb))
        jobs = [(DIRECTION[Op(op)], stage, mb) for op, stage, mb in zip(*columns, strict=True)]
        found.append(Cycle(_plain(float(run.start[together].min())), jobs))
    return found


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value


def table(numbers: Mapping[str, Any]) -> str:
    """The same numbers to read."""
    scalars = [(key, value) for key, value in numbers.items() if not isinstance(value, (dict, list))]
    lines = [f"{key.replace('_', ' '):22}{_short(value)}" for key, value in scalars]
    name, limit = max(numbers["bounds"].items(), key=lambda one: one[1])
    by_stage = [key for key in ("versions", "staleness") if key in numbers]
    lines += [f"{key:22}{', '.join(map(str, numbers[key]))} (by stage)" for key in by_stage]
    lines.append(f"{'bound':22}{_short(limit)} ({name.replace('_', ' ')}); latency is {numbers['gap']:.1%} above")
    rows = [_cells(worker) for worker in numbers["workers"]]
    cells = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["", *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)]
    return "\n".join(lines)


def _cells(worker: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table, by its columns' titles; what is received by kind, as the kinds are called in a file."""
    received = (
        (f"{'received ' if kind == Kind.X else ''}{KIND_NAME[kind]}", worker["receives"][words])
        for kind, words in KIND_WORDS.items()
    )
    return {
        "worker": worker["worker"],
        "busy": worker["busy"],
        "peak activations": worker["peak_activations"],
        "weights owned": worker["weight_storage"],
        "used elsewhere": worker["weight_uses_away_from_home"],
        **dict(received),
        **({"exchanges": worker["exchanges"]} if "exchanges" in worker else {}),
        **({"peak bytes": worker["peak_bytes"]} if "peak_bytes" in worker else {}),
    }


def summary(numbers: Mapping[str, Any]) -> str:
    """What `simulate.report` says, to read: single numbers, then the groups of numbers that have names."""
    lines = []
    for key, value in numbers.items():
        if isinstance(value, dict):
            parts = (
                (name.replace("_", " ") if name.islower() else name, max(n) if isinstance(n, list) else n)
                for name, n in value.items()
            )
            value = ", ".join(f"{name} {_short(n)}" for name, n in parts if n)
        if not isinstance(value, list):
            lines.append(f"{key.replace('_', ' '):22}{_short(value)}")
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
