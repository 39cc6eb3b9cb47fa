"""Scheme in, program out: place, order, lower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

import schedgen
from schedgen.checker import check
from schedgen.compiler.job_graph import graph
from schedgen.compiler.options import Options
from schedgen.compiler.order import greedy, strict
from schedgen.compiler.passes import lower
from schedgen.compiler.place import MOST_JOBS, caps, marks, place, priorities
from schedgen.compiler.refine import (
    exchanges,
    named,
    refine,
    refine_apart,
    refine_edges,
    spread,
    tie_shards,
)
from schedgen.ir.cost import durations
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F
from schedgen.ir.limits import MOST_PAIRS, MOST_TIES, MOST_USES
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import StageGraph, chain
from schedgen.ir.tensor_parallel import TensorParallel, check_workers
from schedgen.ir.weight_versions import UPDATES
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import RefusedFile, UsageError


def compile_scheme(
    scheme: Scheme,
    sizes: Sizes,
    mode: str | None = None,
    n: str | None = None,
    cost: Mapping[str, float] | None = None,
    weight_slots: int = 2,
    fan_out: int = 2,
    prefetch: int = 1,
    recompute: Collection[int] = (),
    memory: int | None = None,
    tied: Collection[Sequence[int]] = (),
    updates: str | None = None,
    tensor: int = 1,
    whole: Collection[int] = (),
    parts: int = 1,
) -> Program:
    """The projected program of `scheme`.

    mode, n  replace the scheme's own ("greedy" or "strict"; a name in ORDERS)
    cost     duration of each direction, which greedy orders by and which
             decides how transfers of different workers interleave
    weight_slots  foreign weight copies a worker may hold at a time
    fan_out  copies of one stage's weights, or sums of its gradients, that go
             through one worker at a time; the others pass them on
    prefetch  jobs by which receives stand before the place where they are sent
    recompute  stages whose forwards keep nothing and are redone before backward
    memory   saved forwards a worker may hold at a time (greedy)
    tied     lists of stages that share parameters, whose gradients are summed before the step
    updates  when weights change, one of UPDATES; default: the scheme's own
    parts    stages of the model that each stage of the scheme stands for, one behind the other
    tensor   shards of each of the model's stages: stage sT + t of the program is shard t of stage s
    whole    stages of the model that all shards compute alike, the last besides; of the others they make a sum

    Where there are parts, `recompute`, `tied` and `whole` are stages of the model.
    Raises UsageError where sizes, w, n or cap make no schedule.
    """
    S, batches = sizes.stages, sizes.microbatches
    cost = durations(cost, scheme.split)
    directions = len(cost)
    if n is not None:
        if n not in ORDERS:
            raise UsageError(f"there is no order '{n}': it is one of {', '.join(ORDERS)}")
        scheme = scheme._replace(n=ORDERS[n](sizes), order=n)
    mode, updates = mode or scheme.mode, updates or scheme.updates
    if updates not in UPDATES:
        raise UsageError(f"there are no updates '{updates}': they are one of {', '.join(UPDATES)}")
    if n is not None or mode != scheme.mode:  # which backwards are whole, and what leaves in pairs, is of its own order
        scheme = scheme._replace(whole=None, paired=None)
    limits = caps(scheme, S)
    if mode == "strict" and (limits is not None or memory is not None):
        what = "--memory-limit" if limits is None else "cap"
        raise UsageError(f"{what} works with --mode greedy: a strict n leaves nothing to hold back")
    if S * parts * tensor * batches * directions > MOST_JOBS:
        raise UsageError(
            f"{S * parts * tensor} stages x {batches} microbatches are more than {MOST_JOBS} jobs: too many"
        )
    counts = _counts(sizes.shards, S * parts)
    if parts > 1 and max(counts) > 1:
        raise UsageError("--shards divides the weights of a stage, and --parts a stage itself: give one of them")
    weights, compute, workers, owners = place(scheme, S, batches, directions, counts[::parts], tensor)
    if workers * S * parts * tensor > MOST_PAIRS:
        raise UsageError(f"{workers} workers and {S * parts * tensor} stages are too many")
    if owners and (tied or updates != "flush" or tensor > 1):
        what = "--tied: stages that share parameters have them" if tied else f"--updates {updates}: an owner steps them"
        what = "--tensor: each shard of a stage has its weights" if tensor > 1 else what
        raise UsageError(f"--shards does not go with {what} as a whole")
    edges = refine_edges(chain(S) if scheme.edges is None else scheme.edges, S, parts, tensor)
    ranks = refine(priorities(scheme, S, batches, directions), parts, tensor).ravel()
    undivided, paired = (
        np.repeat(marks(function, S, batches), parts * tensor, axis=0) for function in (scheme.whole, scheme.paired)
    )
    paired[np.arange(len(paired)) // tensor % parts < parts - 1] = False
    limits = None if limits is None else np.repeat(limits, parts * tensor).tolist()
    of_model = S * parts
    S = of_model * tensor  # from here on, stages are those of the program
    weights, compute = spread(weights, parts), spread(compute, parts)
    if whole and tensor == 1:
        raise UsageError("--whole says what shards compute alike: give --tensor, too")
    whole = named("--whole", whole, of_model)
    split = np.repeat(~np.isin(np.arange(of_model), (*whole, of_model - 1)), tensor) & (tensor > 1)
    if tensor > 1:
        check_workers(compute, tensor, tuple(cost))
        if updates != "flush":
            raise UsageError(f"--updates {updates}: weights that have versions have no shards: leave --tensor out")
        whole = tuple(np.flatnonzero(~split[::tensor]).tolist())

    def sums(stage: int) -> range:
        first = stage - stage % tensor
        return range(first, first + tensor) if split[stage] else range(stage, stage + 1)

    jobs = graph(S, batches, directions, edges, sums)
    length = np.repeat(np.array(list(cost.values()), np.float64), S * batches)
    if undivided.any():
        length.reshape(3, -1)[:, undivided.ravel()] = np.array([[cost["F"]], [cost["I"] + cost["W"]], [0.0]])
    redo = np.zeros((S, batches), bool)
    redo[[s * tensor + t for s in named("--recompute", recompute, of_model) for t in range(tensor)]] = True
    length.reshape(directions, -1)[B, (redo | (compute[F] != compute[B])).ravel()] += cost["F"]
    if mode == "greedy":
        start = greedy(jobs, compute.ravel(), ranks, length, limits, memory)
    else:
        late = np.zeros(len(length), bool)
        late[: S * batches] = paired.ravel()
        start = strict(jobs, compute.ravel(), ranks, length, late)
    header = Header(
        scheme={
            "name": scheme.name, "workers": workers, "stages": S, "microbatches": batches,
            **({"shards": counts[0] if len(set(counts)) == 1 else counts} if owners else {}), **scheme.parameters,
            **({} if parts == 1 else {"parts": parts}),
        },
        mode=mode,
        n=scheme.order,
        cost=cost,
        lowering={
            "weight_slots": weight_slots,
            "fan_out": fan_out,
            "prefetch": prefetch,
            "recompute": np.flatnonzero(redo[:, 0]).tolist(),
            **({} if updates == "flush" else {"updates": updates}),
        },
        graph=StageGraph(S, edges, refine_apart(scheme.apart, split, parts, tensor)),
        tied=_ties(tied, split, tensor),
        groups=(),
        compute=compute,
        weights=weights,
        generator=f"schedgen {schedgen.__version__}",
        part_owners=owners,
        tensor_parallel=TensorParallel(tensor, whole if tensor > 1 else (), S),
    )  # fmt: skip
    several = {ranks for ranks, more in zip(header.owners, header.several_owners, strict=True) if more}
    several |= {header.ties.sharers(tie) for tie in range(len(header.tied))}
    several |= exchanges(compute, split, tensor)
    groups = tuple(sorted(several | {tuple(range(workers))}, key=lambda group: (-len(group), group)))
    options = Options(undivided, paired, redo, weight_slots, fan_out, prefetch)
    program = lower(replace(header, groups=groups), start, options)
    if header.part_uses() > MOST_USES * len(program):
        raise UsageError(
            f"--shards: {len(header.weight_shards.units)} parts are too many for so few workers and microbatches"
        )
    if header.weight_versions.count and several:
        _goes(program)
    return program


def _counts(shards: Sequence[int] | None, stages: int) -> list[int]:
    """Parts of the weights of each stage."""
    counts = list(shards or (1,))
    if len(counts) not in (1, stages):
        raise UsageError(f"--shards has {len(counts)} numbers, but there are {stages} stages")
    return counts * stages if len(counts) == 1 else counts


def _goes(program: Program) -> None:
    """Sums in the middle of a list hold up jobs that the order in time does not wait for."""
    try:
        check(program)
    except RefusedFile as error:
        if "(rule 4: " not in str(error) and "(rule 6: " not in str(error):
            raise
        raise UsageError(
            f"--updates {program.header.weight_versions.updates}: in this order sums of different stages wait for one "
            "another: a worker that shares a stage with others should have no other stage, or the same order as they"
        ) from None


def _ties(tied: Collection[Sequence[int]], split: NDArray[np.bool_], tensor: int) -> tuple[tuple[int, ...], ...]:
    """Ties of the model in the order of the file, a tie said twice is one; and the shards of each split stage."""
    stages = len(split) // tensor
    for tie in tied:
        if len(tie) < 2 or len(set(tie)) < len(tie) or not all(0 <= stage < stages for stage in tie):
            given = ",".join(map(str, tie))
            raise UsageError(f"--tied {given}: a tie is two or more different stages in 0..{stages - 1}")
    found = sorted({tuple(sorted(tie)) for tie in tie_shards(tied, np.flatnonzero(split[::tensor]).tolist(), tensor)})
    for stage, times in Counter(stage for tie in found for stage in tie).items():
        if times > MOST_TIES:
            raise UsageError(f"--tied: stage {stage} is in {times} ties, more than {MOST_TIES}")
    return tuple(found)
