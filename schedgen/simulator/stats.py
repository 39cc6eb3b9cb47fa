"""The numbers of a schedule, and those of a simulation; schedgen/docs/reference.md, "Numbers", explains them.

`stats`: Table 1 of Rahimi 2025, and more, per worker and in total. Times are those of `simulate` with messages that
take no time, as Rahimi 2025 assumes ("we assume that transmission latencies can be hidden").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedgen.analysis import Memory, MemoryTimeline, analyse
from schedgen.ir.cost import Amount
from schedgen.ir.effects import Buffer
from schedgen.ir.header import Header
from schedgen.ir.instructions import KIND_WORDS, LETTER, Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.lower_bounds import lower_bounds
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import Simulation, simulate
from schedgen.simulator.timeline import CAUSES
from schedgen.util.arrays import Numbers, Times


def stats(program: Program, cost: Mapping[str, Amount] | None = None, machine: Machine | None = None) -> dict[str, Any]:
    """All numbers of a projected program that `check` accepts, by name, in the units of `cost` (default: the file's).

    With a `machine` the numbers include bytes; its links and speeds are ignored.
    """
    header = program.header
    cost = header.cost if cost is None else cost
    run = simulate(program, cost, (machine or Machine())._replace(alpha=0.0, beta=0.0, joined=None))
    memory = analyse(program).memory
    latency, (begins, ends) = run.latency, run.windows
    bubbles = (ends - begins - run.busy)[np.isfinite(begins)]
    if len(header.directions) == 3 and not len(program.rows_of(Op.BWD)):
        cost = {name: time for name, time in cost.items() if name != "B"}
    limits = lower_bounds(header, cost, _in_flight(program), program.job_rows(Op.RECOMPUTE) >= 0)
    gap = latency / max(limits.values()) - 1
    numbers: dict[str, Any] = {
        "scheme": dict(header.scheme),
        "latency": _plain(latency),
        "throughput": len(program.rows_of(*LETTER)) / (latency * header.workers),
        "bubble": run.bubble,
        "bounds": {name: _plain(limit) for name, limit in limits.items()},
        "gap": 0.0 if abs(gap) < 1e-9 else gap,  # rounding is no gap
        "own_window_bubble": _plain(float(bubbles.max())),
        "peak_activations": int(memory.saved.max()),
        "mean_peak_activations": float(memory.saved.mean()),
        "messages": len(program.rows_of(Op.SEND)),  # without those of collectives
        "collectives": len(analyse(program).waits.members),
    }
    if tensor := header.tensor_parallel:
        numbers["exchanges"] = len(program.exchanges()) // tensor.degree
    slots = {
        "receive_slots": _receive_slots(program, Buffer.X, Buffer.G),
        "receive_slots_apart": _receive_slots(program, Buffer.X) + _receive_slots(program, Buffer.G),
    }
    numbers |= {name: int(by_rank.sum()) for name, by_rank in slots.items()}
    numbers |= {"instructions": len(program), "workers": _workers(program, run.busy, memory)}
    for rank, worker in enumerate(numbers["workers"]):
        worker |= {name: int(by_rank[rank]) for name, by_rank in slots.items()}
    if not header.has_flush:
        numbers |= {"versions": _most_versions(program).tolist(), "staleness": _staleness(program).tolist()}
    if machine is not None:
        kinds = {**run.memory._asdict(), "places": run.footprint.slots, "owned": run.footprint.owned}
        numbers["peak_bytes"], numbers["host_bytes"] = int(run.footprint.peak.max()), int(run.footprint.host.max())
        numbers["memory_bytes"] = {kind: int(most.max()) for kind, most in kinds.items()}
        for rank, worker in enumerate(numbers["workers"]):
            worker["peak_bytes"], worker["host_bytes"] = int(run.footprint.peak[rank]), int(run.footprint.host[rank])
            worker["memory_bytes"] = {kind: int(most[rank]) for kind, most in kinds.items()}
    return numbers


def most_weights(numbers: Mapping[str, Any]) -> float:
    """Of the numbers of `stats`: the weights of a worker at the most, in stages, of its own and foreign copies."""
    most: float = max(worker["weight_storage"] + worker["peak_memory"]["weight"] for worker in numbers["workers"])
    return most


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _receive_slots(program: Program, *kinds: Buffer) -> Numbers:
    """By worker: the most received buffers of these kinds, which may share slots, that are live at once."""
    lifetimes, most = analyse(program).lifetimes, np.zeros(program.header.workers, np.int64)
    received = lifetimes.is_received & np.isin(lifetimes.buffer, kinds)
    np.maximum.at(most, program.rows.rank, lifetimes.timeline(received.astype(np.int64)).during)
    return most


def _in_flight(program: Program) -> Numbers:
    """By worker: the most of its forwards at once that are saved for a backward to come, wherever this is."""
    lifetimes, most = analyse(program).lifetimes, np.zeros(program.header.workers, np.int64)
    saved = np.zeros(len(program), np.int64)
    saved[lifetimes.begin[lifetimes.buffer == Buffer.SAVED]] = 1
    begun, ended = saved * program.is_one_of(Op.FWD, Op.RECOMPUTE), 1 * program.is_one_of(Op.BWD, Op.BWD_W)
    np.maximum.at(most, program.rows.rank, MemoryTimeline(begun, ended).during)
    return most


def _workers(program: Program, busy: Times, memory: Memory) -> list[dict[str, Any]]:
    header, table, workers = program.header, program.rows, program.header.workers
    received = program.is_one_of(Op.RECV, Op.FETCH_W)
    receives = {
        words: np.bincount(table.rank[received & (table.kind == kind)], minlength=workers)
        for kind, words in KIND_WORDS.items()
    }
    shards = header.weight_shards
    stored = header.is_owner @ (1 / shards.counts[shards.stage_of])  # stages, shards of a stage as fractions
    away = _uses_away_from_home(header)
    exchanges = np.bincount(table.rank[program.exchanges()], minlength=workers) if header.tensor_parallel else None
    return [
        {
            "worker": rank,
            "busy": _plain(float(busy[rank])),  # time of its jobs
            "peak_activations": int(memory.saved[rank]),
            "weight_storage": _plain(round(float(stored[rank]), 9)),
            "weight_receives": int(receives["weight"][rank]),
            "weight_uses_away_from_home": int(away[rank]),
            "activation_receives": int(receives["activation"][rank] + receives["gradient"][rank]),
            "gradient_receives": int(receives["weight_gradient"][rank]),
            "receives": {words: int(count[rank]) for words, count in receives.items()},
            **({} if exchanges is None else {"exchanges": int(exchanges[rank])}),
            "peak_memory": {kind: int(peak[rank]) for kind, peak in memory._asdict().items()},
        }
        for rank in range(workers)
    ]


def _uses_away_from_home(header: Header) -> Numbers:
    """By worker: its jobs whose weights, or shards of them, live elsewhere."""
    is_sharded = np.array([bool(header.weight_shards) and len(ranks) > 1 for ranks in header.owners])
    weights = header.weights[: len(header.compute)]
    elsewhere = (weights != header.compute) | is_sharded[:, None]
    return np.bincount(header.compute[elsewhere], minlength=header.workers)


def _most_versions(program: Program) -> Numbers:
    """By stage: the most versions of its weights that an owner holds at once."""
    lifetimes, stages = analyse(program).lifetimes, program.header.stages
    lives = np.flatnonzero(lifetimes.buffer == Buffer.W)
    pair = lifetimes.rank[lives] * stages + lifetimes.size_column[lives]
    begins, ends = lifetimes.begin[lives], lifetimes.end[lives]
    rows = np.concatenate([begins, ends[ends >= 0]])
    pairs = np.concatenate([pair, pair[ends >= 0]])
    order = np.lexsort((rows, pairs))
    held = np.cumsum(np.where(order < len(lives), 1, -1))
    # Each pair before has left one version in the running sum, the newest.
    number = np.unique(pairs[order], return_inverse=True)[1]
    most = np.zeros(stages, np.int64)
    np.maximum.at(most, pairs[order] % stages, held - number)
    return most


def _staleness(program: Program) -> Numbers:
    """By stage: the most updates between the weights a gradient was computed with and those that it changes."""
    header, rows = program.header, program.rows.take(program.rows_of(Op.FWD))
    most = np.zeros(header.stages, np.int64)
    np.maximum.at(most, rows.stage, rows.mb // np.array(header.weight_versions.rounds)[rows.stage] - rows.version)
    return most


def simulation_numbers(program: Program, run: Simulation) -> dict[str, Any]:
    """The numbers in docs/reference.md: times in the unit of the costs; bytes in all, by kind, link and worker."""
    table, workers = program.rows, program.header.workers
    sends = program.rows_of(Op.SEND)
    link, number = np.unique(table.rank[sends].astype(np.int64) * workers + table.to[sends], return_inverse=True)
    traffic = np.bincount(number, run.message_bytes[sends], minlength=len(link)).astype(np.int64)
    return {
        "latency": run.latency,
        "makespan": run.makespan,
        "bubble": run.bubble,
        "idle": {cause: float(run.idle[:, i].sum()) for i, cause in enumerate(CAUSES)},
        "bytes": {words: int(run.message_bytes[table.kind == kind].sum()) for kind, words in KIND_WORDS.items()},
        **_exchanges(program, run),
        "offload_bytes": int(run.message_bytes[table.kind >= Kind.SAVED].sum()),  # or lent; both ways
        "links": [
            {"from": int(pair // workers), "to": int(pair % workers), "bytes": int(size)}
            for pair, size in zip(link, traffic, strict=True)
        ],
        "peak_bytes": int(run.footprint.peak.max()),
        "host_bytes": int(run.footprint.host.max()),
        "peak_memory": {kind: peak.tolist() for kind, peak in run.memory._asdict().items()},
        "workers": [
            {
                "worker": r,
                "busy": float(run.busy[r]),
                "peak_bytes": int(run.footprint.peak[r]),
                "host_bytes": int(run.footprint.host[r]),
                "idle": dict(zip(CAUSES, run.idle[r].tolist(), strict=True)),
            }
            for r in range(workers)
        ],
    }


def _exchanges(program: Program, run: Simulation) -> dict[str, Any]:
    """How many sums over slices there are, and the bytes that they move in all; empty without slices."""
    rows, T = program.exchanges(), program.header.tensor_parallel.degree
    moved = int(2 * (T - 1) * run.summed_bytes[rows].sum() // T)  # by rings
    return {"exchanges": {"sums": len(rows) // T, "bytes": moved}} if T > 1 else {}
