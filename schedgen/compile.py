"""Scheme in, program out: place, order, lower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

import schedgen
from schedgen.check import check
from schedgen.cost import durations
from schedgen.errors import RefusedFile, UsageError
from schedgen.graph import chain, graph
from schedgen.order import greedy, strict
from schedgen.passes import lower
from schedgen.passes.options import Options
from schedgen.program import MOST_TIES, UPDATES, B, F, Header, Program
from schedgen.scheme import Scheme, Sizes, caps, marks, place, priorities
from schedgen.schemes.orders import ORDERS


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
    shards = _counts(sizes.shards, S)
    weights, compute, workers, owners = place(scheme, S, batches, directions, shards)
    if owners and (tied or updates != "flush"):
        what = "--tied: stages that share parameters have them" if tied else f"--updates {updates}: an owner steps them"
        raise UsageError(f"--shards does not go with {what} as a whole")
    edges = chain(S) if scheme.edges is None else scheme.edges
    jobs = graph(S, batches, directions, edges)
    ranks = priorities(scheme, S, batches, directions).ravel()
    length = np.repeat(np.array(list(cost.values()), np.float64), S * batches)
    whole, paired = (marks(function, S, batches) for function in (scheme.whole, scheme.paired))
    if whole.any():
        length.reshape(3, -1)[:, whole.ravel()] = np.array([[cost["F"]], [cost["I"] + cost["W"]], [0.0]])
    redo = np.zeros((S, batches), bool)
    for stage in recompute:
        if not 0 <= stage < S:
            raise UsageError(f"--recompute {stage}: there is no such stage in 0..{S - 1}")
        redo[stage] = True
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
            **({"shards": shards[0] if len(set(shards)) == 1 else shards} if owners else {}), **scheme.parameters,
        },
        mode=mode,
        n=scheme.order,
        cost=cost,
        lowering={
            "weight_slots": weight_slots,
            "fan_out": fan_out,
            "prefetch": prefetch,
            "recompute": sorted(set(recompute)),
            **({} if updates == "flush" else {"updates": updates}),
        },
        edges=edges,
        tied=_ties(tied, S),
        groups=(),
        compute=compute,
        weights=weights,
        generator=f"schedgen {schedgen.__version__}",
        apart=scheme.apart,
        shards=owners,
    )  # fmt: skip
    several = {ranks for ranks, more in zip(header.owners, header.several, strict=True) if more}
    several |= {header.sharers(tie) for tie in range(len(header.tied))}
    groups = tuple(sorted(several | {tuple(range(workers))}, key=lambda group: (-len(group), group)))
    options = Options(whole, paired, redo, weight_slots, fan_out, prefetch)
    program = lower(replace(header, groups=groups), start, options)
    if header.versions and several:
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
            f"--updates {program.header.updates}: in this order sums of different stages wait for one another: "
            "a worker that shares a stage with others should have no other stage, or the same order as they"
        ) from None


def _ties(tied: Collection[Sequence[int]], stages: int) -> tuple[tuple[int, ...], ...]:
    """Ties in the order of the file; a tie said twice is one."""
    for tie in tied:
        if len(tie) < 2 or len(set(tie)) < len(tie) or not all(0 <= stage < stages for stage in tie):
            given = ",".join(map(str, tie))
            raise UsageError(f"--tied {given}: a tie is two or more different stages in 0..{stages - 1}")
    found = sorted({tuple(sorted(tie)) for tie in tied})
    for stage, times in Counter(stage for tie in found for stage in tie).items():
        if times > MOST_TIES:
            raise UsageError(f"--tied: stage {stage} is in {times} ties, more than {MOST_TIES}")
    return tuple(found)
