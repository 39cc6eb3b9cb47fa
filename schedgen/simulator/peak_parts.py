"""What a rank's footprint consists of, by kind and stage: `peak_parts` names every byte of `Footprint.peak`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.effects import Buffer
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.simulator.footprint import computed_bytes, is_computed, owned_parts
from schedgen.simulator.memory_plan import memory_plan

SAVED = "saved forwards"
_COMPUTED = {
    Buffer.SAVED: SAVED,
    Buffer.HALF: "saved by BWD_I",
    Buffer.X: "computed x",
    Buffer.G: "computed g",
    Buffer.OPT: "optimizer state",
}
# What is in a slot, by the instruction that fills it; any other is the first addition to a gradient.
_SLOTS = {
    (Op.RECV, Kind.X): "received x and g",
    (Op.RECV, Kind.G): "received x and g",
    (Op.RECV, Kind.DW): "partial sums",
    (Op.FETCH_W, Kind.W): "copies of weights",
    (Op.STEP, Kind.NONE): "versions of weights",
}


class Part(NamedTuple):
    """Some of the bytes that a rank needs."""

    held: str  # "throughout", "in places" or "at the peak"
    kind: str
    stages: tuple[int, ...]  # a place may serve several; none: no single stage's
    number: int  # of buffers, places or terms
    bytes: int  # of all of them


_Key = tuple[int, str, str, tuple[int, ...]]  # rank, held, kind, stages


def peak_parts(program: Program, sizes: BufferSizes) -> list[list[Part]]:
    """By rank, the parts of its footprint, whose bytes add up to its peak; for a checked, projected program.

    throughout    what it owns
    in places     its memory plan's slots, by what they receive
    at the peak   what is computed and alive at the first row that needs most, and what that job takes while it runs
    """
    counts: Counter[_Key] = Counter()
    bytes: Counter[_Key] = Counter()

    def add(rank: int, held: str, kind: str, stages: tuple[int, ...], size: int) -> None:
        if size:
            counts[rank, held, kind, stages] += 1
            bytes[rank, held, kind, stages] += size

    for part in owned_parts(program.header, sizes):
        for rank in part.ranks:
            add(rank, "throughout", part.kind, (part.stage,) if part.stage >= 0 else (), part.bytes)
    _add_slots(program, sizes, add)
    _add_computed(program, sizes, add)
    parts: list[list[Part]] = [[] for _ in range(program.header.workers)]
    for key, size in bytes.items():
        parts[key[0]].append(Part(*key[1:], counts[key], size))
    return parts


def _add_slots(program: Program, sizes: BufferSizes, add: Callable[..., None]) -> None:
    """The places of every rank, each with all stages that it serves."""
    plan, table = memory_plan(program, sizes), program.rows
    uses: dict[tuple[int, int], tuple[str, set[int]]] = {}  # by rank and slot
    rows = np.flatnonzero(plan.slot >= 0)
    columns = [column[rows] for column in (table.rank, plan.slot, table.op, table.kind, table.stage)]
    for rank, slot, op, kind, stage in np.unique(np.stack(columns), axis=1).T.tolist():
        named = _SLOTS.get((op, kind), "gradients of other ranks' weights")
        uses.setdefault((rank, slot), (named, set()))[1].add(stage)
    for (rank, slot), (named, stages) in sorted(uses.items()):
        add(rank, "in places", named, tuple(sorted(stages)), int(plan.sizes[rank][slot]))


def _add_computed(program: Program, sizes: BufferSizes, add: Callable[..., None]) -> None:
    """What is alive at the first row of each rank that needs most."""
    lifetimes, table, graph = analyse(program).lifetimes, program.rows, program.header.graph
    alive, alone = computed_bytes(program, sizes)
    peak_row = np.full(program.header.workers, -1)
    for rank in program.ranks_with_rows.tolist():
        begin, end = program.bounds[rank : rank + 2]
        row = peak_row[rank] = begin + int(np.argmax((alive + alone)[begin:end]))
        named = Op(table.op[row]).name
        add(rank, "at the peak", f"workspace of {named}", (int(table.stage[row]),), int(alone[row]))
    row = peak_row[lifetimes.rank]
    there = np.flatnonzero(is_computed(lifetimes) & (lifetimes.begin <= row) & (row <= lifetimes.end))
    amounts = lifetimes.amounts(sizes.by_kind(program.header))[there]
    producers = [*range(graph.stages), *(producer for producer, _ in graph.edges)]  # by size column
    column, is_state = lifetimes.size_column[there], lifetimes.buffer[there] == Buffer.OPT
    stages = np.array(producers)[np.where(is_state, 0, column)]
    stages[is_state] = program.header.weight_shards.stage_of[column[is_state]]
    for rank, buffer, stage, size in zip(
        *(column.tolist() for column in (lifetimes.rank[there], lifetimes.buffer[there], stages, amounts)), strict=True
    ):
        add(rank, "at the peak", _COMPUTED[Buffer(buffer)], (stage,), size)
