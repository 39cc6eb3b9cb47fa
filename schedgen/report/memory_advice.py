"""What every rank holds at its peak, and which changes lower the highest peak, by how much and at what cost in time.

Nothing is estimated: with each change the schedule is compiled again, from the recipe that its header gives, checked
and simulated. At most `MOST_COMPILED` schedules are, so each kind of change is tried in one size or a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.checker import check_compiled
from schedgen.compiler.recipe import Recipe, model_options, recipe_of, sizes_of
from schedgen.ir.cost import Amount
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.simulator.machine import Machine
from schedgen.simulator.peak_parts import SAVED, Part, peak_parts
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError, clip
from schedgen.util.progress import over
from schedgen.util.text_table import aligned, short_bytes

MOST_COMPILED = 12  # with the schedule itself
LEAN_SCHEMES = ("v-min", "v-half", "1f1b", "zb-h1", "fsdp")  # tried in place of another


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
    """Advice for a checked, projected program with these costs; `profiled`: greedy may have ordered by them."""
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
            changes.append(Change(change, int(run.footprint.peak.max()), float(run.end.max()), recipe.command))
        except UsageError as error:
            not_tried[change] = str(error)
    changes.sort(key=lambda each: (each.peak_bytes, each.makespan))
    return Advice(peaks, parts, float(own.end.max()), changes, not_tried)


_Tries = Iterator[tuple[str, Recipe | str]]  # a change, and the recipe with it or why there is none


def _own_changes(
    program: Program,
    machine: Machine,
    parts: Sequence[Sequence[Part]],
    rank: int,
    times: Mapping[str, Amount] | None,
) -> _Tries:
    """The scheme with other options; `rank`: the one that needs most; `times`: as for `recipe_of`."""
    try:
        recipe = recipe_of(program, times)
    except UsageError as error:
        yield "--recompute, --offload, --offload-optimizer, --weight-slots, --memory-limit, --shards", str(error)
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
