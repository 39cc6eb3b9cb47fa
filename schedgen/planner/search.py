"""The compiler's schemes for a profile, and of their schedules the ones that no other beats in time and memory.

A pipeline of P workers may stand there W/P times, each with its share of the
microbatches, and stages are as many as the scheme puts on a worker. Each is
compiled and executed by the simulator, unless a bound on its time and its
memory says before that another is no worse in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from schedgen.compiler.compile import compile_scheme
from schedgen.compiler.place import place, priorities
from schedgen.ir.cost import by_stage
from schedgen.ir.instructions import B, F, Ints, W
from schedgen.ir.program import Program
from schedgen.planner.layer_downsets import in_order
from schedgen.planner.layer_profile import Layers, Numbers
from schedgen.planner.partition import Level, partition
from schedgen.planner.stage_costs import Staged, balanced, staged
from schedgen.schemes import load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.lower_bounds import window
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always
from schedgen.util.progress import over

CHUNKS = (2, 4, 8)  # stages a worker of the schemes that go round; of the others, all that fit
STAGES = (1, 2, 4, 8, 16, 32, 64)  # of schemes that put any number of stages on a worker

# Stages a worker; depth-first is lpp with one group, pipedream-flush is 1f1b, ddp and fsdp have a group a worker;
# pipedream, without a flush, does not train the same.
PIPELINES = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "zb-h2", "chimera"), (1,)),
    **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v"), (2,)),
    **dict.fromkeys(("interleaved-1f1b", "looped-bfs", "breadth-first"), CHUNKS),
}
GROUPED = {"lpp": "ddp", "fslpp": "fsdp"}  # and their names where each worker is a group
SEARCHED = (*PIPELINES, *GROUPED, *GROUPED.values(), "1f1b-rr")


class Row(NamedTuple):
    """A schedule, and what the simulator says of it."""

    scheme: str
    stages: int
    replicas: int | tuple[int, ...]  # of the whole pipeline; or of each stage
    recompute: bool  # of all stages, or none
    layers: tuple[int, ...]  # of each stage
    step_time: float  # seconds
    peak_bytes: int  # the most a worker needs


class Found(NamedTuple):
    front: list[Row]  # by seconds: each takes less memory than those before it
    program: Program  # of the first
    schedules: int  # how many there are
    simulated: int  # how many of them were not left out by a bound


class Candidate(NamedTuple):
    """A schedule to try, in one or two cuts of the layers into its stages."""

    name: str
    replicas: int | tuple[int, ...]
    recompute: bool
    scheme: Scheme
    sizes: Sizes
    cuts: Sequence[Staged]


class Bound(NamedTuple):
    """What its first job and its order say of a candidate before it is compiled."""

    seconds: float
    bytes: float


def search(
    layers: Layers,
    levels: Sequence[Level],
    microbatches: int,
    memory: float = math.inf,
    prune: bool = True,
    schemes: Collection[str] | None = None,
) -> Found:
    """All candidates on all workers, with the slowest of the levels' links everywhere.

    `memory`: the most bytes a worker may hold. `schemes`: only these. Raises UsageError if no schedule fits.
    """
    workers = math.prod(level.components for level in levels)
    every = sorted(
        (
            (_bound(one), one)
            for one in candidates(layers, levels, microbatches)
            if schemes is None or one.name in schemes
        ),
        key=lambda pair: pair[0].seconds,
    )
    front: list[tuple[Row, Candidate, Staged]] = []
    simulated = 0
    with compiled_always():
        for bound, one in over(every, "search", len(every)):
            if prune and (bound.bytes > memory or _beaten(bound.seconds, bound.bytes, front)):
                continue
            simulated += 1
            for row, cut in _rows(one):
                if row.peak_bytes <= memory and not _beaten(row.step_time, row.peak_bytes, front):
                    kept = (
                        old for old in front if old[0].step_time < row.step_time or old[0].peak_bytes < row.peak_bytes
                    )
                    front = [*kept, (row, one, cut)]
    if not front:
        what = "no schedule" if schemes is None else f"no schedule of {', '.join(schemes)}"
        limit = f" and {memory:g} bytes each" if math.isfinite(memory) else ""
        raise UsageError(f"{what} fits {workers} workers{limit} with {microbatches} microbatches")
    front.sort(key=lambda found: found[0].step_time)
    _, best, cut = front[0]
    return Found([row for row, _, _ in front], _compiled(best, cut), len(every), simulated)


def _beaten(seconds: float, bytes: float, front: Sequence[tuple[Row, Candidate, Staged]]) -> bool:
    return any(row.step_time <= seconds and row.peak_bytes <= bytes for row, _, _ in front)


# Candidates


def candidates(layers: Layers, levels: Sequence[Level], microbatches: int) -> Iterator[Candidate]:
    """Every scheme that fits, in every number of replicas and of stages, with and without recomputation."""
    workers = math.prod(level.components for level in levels)
    bandwidth = min(level.bandwidth for level in levels)
    order = in_order(layers)
    cuts = balanced(layers, order, bandwidth, min(len(layers.names), workers * CHUNKS[-1]))
    for name, sizes, replicas in _sizes(workers, microbatches, len(cuts)):
        try:
            scheme = load(name, sizes)
        except UsageError:  # interleaving goes in equal rounds, and so on
            continue
        if replicas > 1 and sizes.groups is None and name not in GROUPED.values():
            scheme = replicated(scheme, replicas, workers // replicas)
        whole = sizes._replace(microbatches=microbatches, workers=workers)
        for recompute in (False, True):
            yield Candidate(name, replicas, recompute, scheme, whole, cuts[sizes.stages - 1])
    found = partition(order, levels)
    of_stages = tuple(stage.replicas for stage in found.stages)
    if len(of_stages) > 1 and microbatches >= max(of_stages):
        sizes = Sizes(len(of_stages), microbatches, workers, replicas=of_stages)
        cut = staged(layers, order, [stage.end for stage in found.stages], bandwidth)
        for recompute in (False, True):
            yield Candidate("1f1b-rr", of_stages, recompute, load("1f1b-rr", sizes), sizes, [cut])


def _sizes(workers: int, microbatches: int, most: int) -> Iterator[tuple[str, Sizes, int]]:
    """(scheme, sizes of one pipeline, how many pipelines), whether or not the scheme takes them."""
    for D in (D for D in range(1, workers + 1) if workers % D == 0 and microbatches >= D):
        P = workers // D
        if P > 1:
            for name, chunks in PIPELINES.items():
                for stages in (P * v for v in chunks if P * v <= most):
                    yield name, Sizes(stages, -(-microbatches // D), P), D
        for name, alone in GROUPED.items():
            if P > 1:
                for stages in (P * v for v in (1, *CHUNKS) if P * v <= most):
                    yield name, Sizes(stages, microbatches, workers, D), D
            else:
                for stages in (S for S in STAGES if S <= most):
                    yield alone, Sizes(stages, microbatches, workers), D


def replicated(scheme: Scheme, replicas: int, workers: int) -> Scheme:
    """The scheme, of so many workers, side by side: replica b mod D has microbatch b as its b // D-th."""
    D = replicas

    def w(s: Any, b: Any, d: Any) -> Any:
        weights, compute = scheme.w(s, b // D, d)
        return weights + workers * (b % D), compute + workers * (b % D)

    def marks(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return function and (lambda s, b: function(s, b // D))

    return scheme._replace(
        workers=D * workers,
        w=w,
        n=lambda s, b, d: scheme.n(s, b // D, d),
        whole=marks(scheme.whole),
        paired=marks(scheme.paired),
        parameters={**scheme.parameters, "replicas": D},
    )


# What a candidate comes to


def _bound(one: Candidate) -> Bound:
    directions = 3 if one.scheme.split else 2
    sizes = (one.sizes.stages, one.sizes.microbatches, directions)
    weights, compute, *_ = place(one.scheme, *sizes)
    weights, compute = weights[..., 0], compute[..., 0]
    rank = priorities(one.scheme, *sizes) if one.scheme.mode == "strict" else None
    bounds = [_bound_of(one, cut, weights, compute, rank) for cut in one.cuts]
    return Bound(min(bound.seconds for bound in bounds), min(bound.bytes for bound in bounds))


def _bound_of(one: Candidate, cut: Staged, weights: Ints, compute: Ints, rank: Any) -> Bound:
    S, workers, machine = one.sizes.stages, one.sizes.workers or 1, cut.machine
    lengths = np.array(list(cut.durations(one.scheme.split).values()))
    if len(lengths) > len(compute):  # measured halves of a backward that is not split
        lengths = np.array([lengths[F], lengths[B] + lengths[W]])
    again = lengths[F] if one.recompute else np.zeros(S)
    owned = by_stage(machine.weight if machine.owned is None else machine.owned, S)
    x, weight, saved, step = (
        by_stage(amount, S) for amount in (machine.activation, machine.weight, machine.saved, machine.step)
    )
    message = machine.alpha + machine.beta * x[:-1]
    of, into = np.zeros((2, workers))  # seconds of a link out, and of one in
    held, steps, copy = np.zeros((3, workers))
    for s in range(S):
        owners = np.zeros(workers, bool)
        owners[np.unique(weights[:, s])] = True
        held[owners] += owned[s] + weight[s]
        steps[owners] += step[s]
        guests = np.zeros(workers, bool)
        guests[np.unique(compute[:, s])] = True
        guests &= ~owners
        into[guests] += machine.alpha + machine.beta * weight[s]
        copy[guests] = np.maximum(copy[guests], 2 * weight[s])  # its weights and their gradient
        for d, (a, b) in ((F, (s - 1, s)), (B, (s, s - 1))):
            if s:
                leaves = compute[d, a] != compute[d, b]
                of += message[s - 1] * np.bincount(compute[d, a][leaves], minlength=workers)
                into += message[s - 1] * np.bincount(compute[d, b][leaves], minlength=workers)
    kept = np.concatenate([[0.0], x[:-1]]) + (0 if one.recompute else saved)
    least = max(window(compute, lengths, again, message, workers) + steps.max(), of.max(), into.max())
    return Bound((1 - 1e-9) * float(least), float((held + copy + _alive(kept, compute, workers, rank)).max()))


def _alive(kept: Numbers, compute: Ints, workers: int, rank: Any) -> Numbers:
    """Bytes that each worker must keep of forwards at once; where its order is not known, of one."""
    most = np.zeros(workers)
    bytes = np.broadcast_to(kept[:, None], compute.shape[1:])
    if rank is None:
        np.maximum.at(most, compute[F].ravel(), bytes.ravel())
        return most
    worker, n = compute[: B + 1].ravel(), rank[: B + 1].ravel()
    order = np.lexsort((n, worker))
    alive = np.cumsum(np.concatenate([bytes.ravel(), -bytes.ravel()])[order])  # each worker ends at 0
    np.maximum.at(most, worker[order], alive)
    return most


def _rows(one: Candidate) -> Iterator[tuple[Row, Staged]]:
    try:
        program = _compiled(one, one.cuts[0])
    except UsageError:  # a cap that stops the schedule
        return
    for cut in one.cuts:
        run = simulate(program, cut.durations(one.scheme.split), cut.machine)
        seconds, bytes = float(run.end.max()), int(run.footprint.peak.max())
        yield Row(one.name, one.sizes.stages, one.replicas, one.recompute, cut.layers, seconds, bytes), cut


def _compiled(one: Candidate, cut: Staged) -> Program:
    scheme = one.scheme._replace(parameters={**one.scheme.parameters, "layers": list(cut.layers)})
    recompute = range(one.sizes.stages) if one.recompute else ()
    return compile_scheme(scheme, one.sizes, cost=ratios(cut.durations(scheme.split)), recompute=recompute)


def ratios(durations: dict[str, Numbers]) -> dict[str, float]:
    """How long jobs are on average, in forwards, to four digits: what greedy orders by."""
    forward = float(durations["F"].sum())
    ratios = {name: float(f"{max(seconds.sum() / forward, 1e-3):.4g}") for name, seconds in durations.items()}
    return {name: int(ratio) if ratio.is_integer() else ratio for name, ratio in ratios.items()}
