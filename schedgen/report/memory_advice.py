"""What every rank holds at its peak, and which changes lower the highest peak, by how much and at what cost in time.

`peak_parts` names every byte of a rank's `Footprint.peak`, by kind and stage.

Nothing is estimated: with each change the schedule is compiled again, from the recipe that its header gives, checked
and simulated. At most `MOST_COMPILED` schedules are, so each kind of change is tried in one size or a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.checker import check_compiled
from schedgen.compiler.recipe import Recipe, model_options, recipe_of, sizes_of
from schedgen.ir.cost import Amount
from schedgen.ir.effects import Buffer
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.simulator.footprint import computed_bytes, is_computed, owned_parts
from schedgen.simulator.machine import Machine
from schedgen.simulator.memory_plan import memory_plan
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError, clip
from schedgen.util.progress import over
from schedgen.util.text_table import aligned, short_bytes

MOST_COMPILED = 14  # with the schedule itself
LEAN_SCHEMES = ("v-min", "v-half", "1f1b", "zb-h1", "fsdp")  # tried in place of another

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


class Change(NamedTuple):
    """The schedule compiled with one change."""

    change: str  # the option, or the other scheme
    peak_bytes: int  # of the rank that then needs most
    makespan: float
    command: str  # that compiles it


class Advice(NamedTuple):
    """What ranks hold, and what lowers the highest peak."""

    peaks: list[int]  # bytes by rank
    parts: list[list[Part]]  # by rank
    makespan: float
    changes: list[Change]  # the lowest peak first; those that do not lower it last
    not_tried: dict[str, str]  # by change: why

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(self.peaks)


def memory_advice(program: Program, cost: Mapping[str, Amount], machine: Machine, profiled: bool = False) -> Advice:
    """Advice for a checked, projected program with these costs; `profiled`: it may be compiled with them."""
    own = simulate(program, cost, machine)
    peaks, parts = own.footprint.peak.tolist(), peak_parts(program, own.sizes)
    changes, not_tried, compiled = [], {}, 0
    tries = [
        *_own_changes(program, machine, parts, peaks.index(max(peaks)), cost if profiled else None),
        *_other_schemes(program),
    ]
    for change, recipe in over(tries, "compile", len(tries)):
        try:
            if isinstance(recipe, str) or compiled == MOST_COMPILED - 1:  # and the schedule itself
                raise UsageError(recipe if isinstance(recipe, str) else f"{MOST_COMPILED} schedules were compiled")
            compiled += 1
            changed = recipe.compile()
            check_compiled(changed)
            run = simulate(changed, cost, machine)
            changes.append(Change(change, int(run.footprint.peak.max()), run.makespan, recipe.command))
        except UsageError as error:
            not_tried[change] = str(error)
    changes.sort(key=lambda each: (each.peak_bytes, each.makespan))
    return Advice(peaks, parts, own.makespan, changes, not_tried)


_Tries = Iterator[tuple[str, Recipe | str]]  # a change, and the recipe with it or why there is none


def _own_changes(
    program: Program, machine: Machine, parts: Sequence[Sequence[Part]], rank: int, times: Mapping[str, Amount] | None
) -> _Tries:
    """The scheme with other options; `rank`: the one that needs most; `times`: as for `recipe_of`."""
    try:
        recipe = recipe_of(program, times, machine.joined and machine.joined.hosts)
    except UsageError as why:
        yield "--recompute, --offload, --evict, --offload-optimizer, --weight-slots, --memory-limit, --shards", str(why)
        return
    options, header, host = recipe.options, program.header, machine.network.host
    saved = {part.stages[0] // options.tensor: part.bytes for part in parts[rank] if part.kind == SAVED}
    sets = [[max(saved, key=lambda stage: saved[stage])], sorted(saved), range(header.model_stages)] if saved else []
    for name, other in (("recompute", "offload"), ("offload", "recompute")):
        for stages in dict.fromkeys(map(tuple, sets)) if name == "recompute" or host.is_known else ():
            named = "all" if len(stages) == header.model_stages else ",".join(map(str, stages))
            chosen = (*dict.fromkeys((*getattr(options, name), *stages)),)
            left = tuple(each for each in getattr(options, other) if np.ravel(each)[0] not in stages)
            replaces = f" in place of --{other}" * (len(left) < len(getattr(options, other)))
            changed: dict[str, Any] = {name: chosen, other: left}
            yield f"--{name} {named}{replaces}", recipe._replace(options=replace(options, **changed))
    if not saved:
        yield "--recompute, --offload", f"rank {rank} has no saved forwards at its peak"
    elif not host.is_known:
        yield "--offload", "no machine file says what the link to the host's memory carries"
    evicting = recipe._replace(options=replace(options, evict=True))
    yield "--evict", "forwards are lent already" if options.evict else evicting
    if options.offload_optimizer or not host.is_known:
        reason = "it is there already" if options.offload_optimizer else "no machine file says what its link carries"
        yield "--offload-optimizer", reason
    else:
        yield "--offload-optimizer", recipe._replace(options=replace(options, offload_optimizer=True))
    if options.weight_slots > 1 and any(part.kind == "copies of weights" for part in parts[rank]):
        yield "--weight-slots 1", recipe._replace(options=replace(options, weight_slots=1))
    else:
        yield "--weight-slots", f"rank {rank} has at most one copy of weights at a time"
    most = int(analyse(program).memory.saved.max())
    strict, mode = header.mode == "strict", "greedy" if header.mode == "strict" else options.mode
    for limit in dict.fromkeys(limit for limit in (most - 1, (most + 1) // 2) if 0 < limit < most):
        change = f"{'--mode greedy ' * strict}--memory-limit {limit}"
        yield change, recipe._replace(options=replace(options, mode=mode, memory_limit=limit))
    if most < 2:
        yield "--memory-limit", f"no rank saves more than {most} forwards"
    if recipe.sizes.shards is None and header.workers > 1:
        yield f"--shards {header.workers}", recipe._replace(sizes=recipe.sizes._replace(shards=(header.workers,)))
    else:
        yield "--shards", "weights are divided already, or there is one rank"


def _other_schemes(program: Program) -> _Tries:
    """Lean schemes for the same model on the same ranks."""
    header = program.header
    for name in LEAN_SCHEMES:
        if name == header.scheme["name"]:
            continue
        if not header.has_flush:
            yield name, "weights have versions, which another scheme has not"
            continue
        try:
            sizes = sizes_of(header)._replace(groups=None, chunks=None, group=None)
            split = load(name, sizes, header.tensor_parallel.degree).split
        except UsageError as error:
            yield name, str(error)
            continue
        cost = None if split and "I" not in header.cost else header.cost
        yield name, Recipe(name, sizes, replace(model_options(header), cost=cost), False, header)


def advice_as_json(advice: Advice) -> dict[str, Any]:
    """The advice as JSON."""
    ranks = zip(advice.peaks, advice.parts, strict=True)
    return {
        "peak_bytes": advice.peak_bytes,
        "makespan": advice.makespan,
        "workers": [
            {"worker": rank, "peak_bytes": peak, "parts": [part._asdict() for part in parts]}
            for rank, (peak, parts) in enumerate(ranks)
        ],
        "changes": [change._asdict() for change in advice.changes],
        "not_tried": advice.not_tried,
    }


def advice_as_text(advice: Advice) -> Iterator[str]:
    """The advice as lines: what each rank holds, then a line for each change."""
    for rank, (peak, parts) in enumerate(zip(advice.peaks, advice.parts, strict=True)):
        yield f"rank {rank} needs {short_bytes(peak)}"
        cells = [
            (f"  {part.held}", part.kind, _stages(part), str(part.number), short_bytes(part.bytes)) for part in parts
        ]
        yield from aligned(cells, 3)
    lower = [change for change in advice.changes if change.peak_bytes < advice.peak_bytes]
    yield ""
    yield f"peak {short_bytes(advice.peak_bytes)}, makespan {advice.makespan:.4g}" + "; lower with" * bool(lower)
    rows = []
    for change in lower:
        saved, longer = 1 - change.peak_bytes / advice.peak_bytes, change.makespan / advice.makespan - 1
        time = f"{change.makespan:.4g}", f"{longer:+.1%}"
        rows.append((change.change, short_bytes(change.peak_bytes), f"{-saved:.1%}", *time))
    yield from aligned([(f"  {first}", *rest) for first, *rest in rows], 1)
    if no_lower := [change.change for change in advice.changes if change.peak_bytes >= advice.peak_bytes]:
        yield f"no lower with {', '.join(no_lower)}"
    for untried, reason in advice.not_tried.items():
        yield f"not tried: {untried}: {clip(reason)}"


def _stages(part: Part) -> str:
    return f"stage{'s' * (len(part.stages) > 1)} {','.join(map(str, part.stages))}" if part.stages else ""
