"""A simulation summed up in single numbers: latency, bubble, idle time by cause, traffic, peak memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import KIND_WORDS, Op
from schedgen.ir.program import Program
from schedgen.simulator.simulate import Simulation
from schedgen.simulator.timeline import CAUSES


def simulation_numbers(program: Program, run: Simulation) -> dict[str, Any]:
    """The numbers in docs/reference.md: times in the unit of the costs; bytes in all, by kind, link and worker."""
    table, workers = program.rows, program.header.workers
    sends = program.rows_of(Op.SEND)
    link, number = np.unique(table.rank[sends].astype(np.int64) * workers + table.to[sends], return_inverse=True)
    traffic = np.bincount(number, run.message_bytes[sends], minlength=len(link)).astype(np.int64)
    return {
        "latency": run.latency,
        "makespan": float(run.end.max()),
        "bubble": run.bubble,
        "idle": {cause: float(run.idle[:, i].sum()) for i, cause in enumerate(CAUSES)},
        "bytes": {words: int(run.message_bytes[table.kind == kind].sum()) for kind, words in KIND_WORDS.items()},
        **_exchanges(program, run),
        "links": [
            {"from": int(pair // workers), "to": int(pair % workers), "bytes": int(size)}
            for pair, size in zip(link, traffic, strict=True)
        ],
        "peak_bytes": int(run.footprint.peak.max()),
        "peak_memory": {kind: peak.tolist() for kind, peak in run.memory._asdict().items()},
        "workers": [
            {
                "worker": r,
                "busy": float(run.busy[r]),
                "peak_bytes": int(run.footprint.peak[r]),
                "idle": dict(zip(CAUSES, run.idle[r].tolist(), strict=True)),
            }
            for r in range(workers)
        ],
    }


def _exchanges(program: Program, run: Simulation) -> dict[str, Any]:
    """How many sums over slices there are, and the bytes that they move in all; empty without slices."""
    rows, T = program.exchanges(), program.header.tensor_parallel.degree
    if T == 1:
        return {}
    moved = int(2 * (T - 1) * run.summed_bytes[rows].sum() // T)  # by rings
    return {"exchanges": {"sums": len(rows) // T, "bytes": moved}}
