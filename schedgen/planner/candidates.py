"""The schedules that a search tries: every scheme that fits, in every number of replicas and stages; and a lower
bound on the time and memory of each, from its placement and order, before it is compiled.

A pipeline of P workers may run W/P times side by side, each with its share of the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from schedgen.compiler.place import place_jobs, priorities
from schedgen.compiler.sum_trees import ALLREDUCE, TWO_LEVEL
from schedgen.ir.cost import by_stage, has_both, redo_duration, shortest_halves, without_redo
from schedgen.ir.graph_file import ModelGraph
from schedgen.ir.instructions import B, F
from schedgen.ir.stage_graph import StageGraph, chain
from schedgen.planner.layer_profile import Layers
from schedgen.planner.order_search.ways import Way
from schedgen.planner.partition import partition, prefixes
from schedgen.planner.stage_costs import StageCosts, balanced, for_speeds, smallest, stage_costs
from schedgen.schemes import load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.network import Links
from schedgen.util.arrays import Flags, Floats, Ints
from schedgen.util.errors import UsageError

CHUNKS = (2, 4, 8)  # stages a worker, for schemes that go round the workers several times
STAGES = (1, 2, 4, 8, 16, 32, 64)  # for schemes that put any number of stages on a worker
# Both kinds are also tried with a stage a layer, up to 64 stages or 8 a worker.

# Scheme -> stages a worker. Left out are depth-first, which is lpp with one group, and pipedream and pipedream-2bw,
# which do not train the same because they do not flush.
PIPELINES = {
    "gpipe": (1, *CHUNKS),
    **dict.fromkeys(("1f1b", "zb-h1", "zb-h2", "chimera"), (1,)),
    **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v"), (2,)),
    **dict.fromkeys(("interleaved-1f1b", "interleaved-zb", "breadth-first", "hanayo"), CHUNKS),
}
GROUPED = {"lpp": "ddp", "fslpp": "fsdp"}  # scheme with groups -> its name if each worker is a group
SEARCHED = (*PIPELINES, *GROUPED, *GROUPED.values(), "1f1b-rr")


class Candidate(NamedTuple):
    """A schedule to try, with the ways to gather the layers into its stages."""

    name: str
    replicas: int | tuple[int, ...]  # of the whole pipeline, or of each stage
    interleave: bool  # whether the replicas of a stage, not the stages of a replica, are neighbours
    way: Way  # of all forwards
    scheme: Scheme
    sizes: Sizes  # of all replicas
    costs: Sequence[StageCosts]
    sums: str = ALLREDUCE  # how several owners of a stage sum its gradient


def with_layers(scheme: Scheme, costs: StageCosts) -> Scheme:
    """The scheme with the number of layers in each stage, by which mpirun cuts the model, and the stages' edges."""
    scheme = scheme._replace(parameters={**scheme.parameters, "layers": list(costs.layer_counts)})
    graph = costs.graph
    return scheme if graph is None else scheme._replace(edges=graph.edges, per_consumer=graph.per_consumer)


def candidates(
    layers: Layers, workers: int, bandwidth: float, microbatches: int, memory: float = math.inf
) -> Iterator[Candidate]:
    """Every candidate on all workers, with each way of its forwards; to the host only if its link is known.

    With a limit of `memory` bytes a worker, layers are also gathered so that the largest stage needs few bytes, and
    where devices differ so that slow ones have few.
    """
    count, most = len(layers.names), workers * CHUNKS[-1]
    by_stages = balanced(layers, bandwidth, count if count <= max(most, STAGES[-1]) else most)
    if math.isfinite(memory):
        for ways, costs in zip(by_stages, smallest(layers, len(by_stages)), strict=False):
            if all(costs.layer_counts != other.layer_counts for other in ways):
                ways.append(costs)
    allowed = [way for way in Way if way != Way.AWAY or layers.machine.network.host.is_known]
    tried = range(1, min(most, len(by_stages)) + 1), count if len(by_stages) == count else 0
    links = Links(layers.machine.network, workers)
    hosts = links.group[0] if links.is_uneven else None
    speeds = layers.machine.network.by_rank(layers.machine.network.speed, workers)
    of_speeds = cache(partial(for_speeds, layers))
    for name, sizes, replicas in _pipelines(workers, microbatches, hosts, *tried):
        for interleave in (False, True) if hosts is not None and sizes.replicas and name != "fsdp" else (False,):
            try:
                scheme = load(name, sizes, interleave=interleave)
            except UsageError:  # such as interleaving where stages do not go round the workers in equal rounds
                continue
            alone = sizes._replace(replicas=None)  # else a search would also begin with other schemes' orders
            gathered = by_stages[sizes.stages - 1]
            if (speeds != speeds[0]).any():  # a stage has as many layers as the slowest of its workers allows
                slowest = speeds[place_jobs(scheme, sizes.stages, microbatches, 2)[1][F, ..., 0]].min(axis=1).tolist()
                costs = of_speeds(tuple(slowest)) if len({*slowest}) > 1 else gathered[0]
                gathered = [*gathered, *[costs] * all(costs.layer_counts != each.layer_counts for each in gathered)]
            is_tied = any(each.tied for each in gathered)
            has_owners = sizes.replicas is not None or (replicas > 1 and name in ("lpp", "ddp"))
            on_a_host = interleave or (hosts is not None and workers // replicas < np.bincount(hosts).max())
            two_levels = hosts is not None and has_owners and on_a_host and not is_tied
            for sums, way in product((TWO_LEVEL, ALLREDUCE)[not two_levels :], allowed):
                yield Candidate(name, replicas, interleave, way, scheme, alone, gathered, sums)
    best = partition(prefixes(layers), workers, bandwidth)
    if len(best.stages) > 1 and microbatches >= max(best.replicas):
        sizes = Sizes(len(best.stages), microbatches, workers, replicas=best.replicas)
        costs = stage_costs(layers, best.ends)
        for way in allowed:
            yield Candidate("1f1b-rr", best.replicas, False, way, load("1f1b-rr", sizes), sizes, [costs])


def _pipelines(
    workers: int, microbatches: int, hosts: Ints | None, numbers: range, single: int
) -> Iterator[tuple[str, Sizes, int]]:
    """(scheme, sizes, number of pipelines), even if the scheme refuses them.

    The stages are one of `numbers`, or `single`, a stage a layer; 0: not tried. Where devices have `hosts`, by rank,
    fsdp has replicas inside hosts, too: then weights are fetched there, and gradients summed there first.
    """
    any_number = sorted({*(S for S in STAGES if S in numbers), single} - {0})
    for D in (D for D in range(1, workers + 1) if workers % D == 0 and microbatches >= D):
        P = workers // D
        if P > 1:
            for name, chunks in PIPELINES.items():
                for stages in _looped(P, chunks, numbers, single):
                    yield name, Sizes(stages, microbatches, workers, replicas=D if D > 1 else None), D
        inside = hosts is not None and 1 < P < workers and not np.diff(hosts.reshape(D, P)).any()
        for stages in any_number if inside else ():
            yield "fsdp", Sizes(stages, microbatches, workers, replicas=D), D
        for name, ungrouped in GROUPED.items():
            if P > 1:
                for stages in _looped(P, (1, *CHUNKS), numbers, single):
                    yield name, Sizes(stages, microbatches, workers, D), D
            else:
                for stages in any_number:
                    yield ungrouped, Sizes(stages, microbatches, workers), D


def _looped(workers: int, chunks: Sequence[int], numbers: range, single: int) -> list[int]:
    """The stages of a scheme of so many a worker: one of `numbers`, or `single`."""
    each = range(chunks[0], chunks[-1] + 1)
    return [workers * v for v in each if workers * v == single or (v in chunks and workers * v in numbers)]


class CandidateBound(NamedTuple):
    """No schedule of a candidate takes fewer seconds a step, or fewer bytes on the worker that needs most."""

    seconds: float
    bytes: float


def candidate_bound(candidate: Candidate) -> CandidateBound:
    """The bound that holds for all stage costs of a candidate."""
    scheme, sizes = candidate.scheme, candidate.sizes
    shape = (sizes.stages, sizes.microbatches, 3 if scheme.split else 2)
    weights, compute, *_ = place_jobs(scheme, *shape)
    n = priorities(scheme, *shape) if scheme.mode == "strict" else None
    bounds = [_bound(candidate, costs, weights[..., 0], compute[..., 0], n) for costs in candidate.costs]
    return CandidateBound(*map(min, zip(*bounds, strict=True)))


def _bound(candidate: Candidate, costs: StageCosts, weights: Ints, compute: Ints, n: Any) -> CandidateBound:
    """The bound for one of the stage costs: each worker's jobs and STEPs, the sums, its own stages and what it saves.

    By job, (D, S, B): `weights`, `compute`, `n`, which is None if greedy.
    """
    S, workers, machine = candidate.sizes.stages, candidate.sizes.workers or 1, costs.machine
    times = costs.durations(candidate.scheme.split)
    if candidate.scheme.unsplit_backward is not None and has_both(costs.times):
        times |= shortest_halves(costs.times, S)
    lengths = np.array([*without_redo(times).values()])
    if candidate.way == Way.REDO:
        lengths[B] += redo_duration(times)
    owned = by_stage(machine.weight if machine.owned is None else machine.owned, S)
    weight, saved, step = (by_stage(amount, S) for amount in (machine.weight, machine.saved, machine.step))
    owns = np.zeros((workers, S), bool)
    owns[weights, np.arange(S)[:, None]] = True
    job = compute * S + np.arange(S)[:, None]  # its worker and stage, as one number
    jobs = np.bincount(job.ravel(), np.repeat(lengths, compute.shape[2]), minlength=workers * S)
    kept = np.concatenate([[0.0], costs.passed_on]) + (saved if candidate.way == Way.KEEP else 0)
    peak = owns @ (owned + weight) + _saved(kept, compute, workers, n)
    busy = float((jobs.reshape(workers, S).sum(axis=1) + owns @ step).max())
    on_links = _on_links(candidate.sums, costs, owns, compute, float(jobs[jobs > 0].min(initial=math.inf)))
    return CandidateBound((1 - 1e-9) * max(busy, on_links), float(peak.max()))


def _on_links(sums: str, costs: StageCosts, owns: Flags, compute: Ints, ready: float) -> float:
    """A bound from the link or card that is occupied longest, by outputs, their gradients and gradients of weights.

    `ready`: before this time no stage's jobs are done on any worker, and no gradient of weights is sent. Of an output
    with several consumers one is counted. By messages the hosts together send at least 2 n bytes for each but one of
    them [Patarasuk and Yuan 2009].
    """
    links, S = Links(costs.machine.network, len(owns)), owns.shape[1]
    made = costs.graph or ModelGraph(S)
    graph = StageGraph(S, made.edges or chain(S), made.per_consumer)
    edges = np.array(graph.edges, np.int64).reshape(-1, 2)
    first = np.unique(edges[:, 0], return_index=True)[1]
    producer, consumer = edges[first].T
    source = np.concatenate([compute[F, producer], compute[B, consumer]]).ravel()
    to = np.concatenate([compute[F, consumer], compute[B, producer]]).ravel()
    moves, bytes = source != to, np.repeat(np.tile(costs.machine.edge_bytes(graph)[first], 2), compute.shape[2])
    paths, _ = links.messages(source[moves], to[moves], bytes[moves])
    occupied = np.bincount(paths.link, paths.hold, minlength=links.count)
    summed, of_level = np.zeros(links.count), np.zeros(len(links.levels))
    owners, kind = np.unique(owns.T, axis=0, return_inverse=True)
    for mine, size in zip(owners, np.bincount(kind.ravel(), by_stage(costs.machine.weight, S)), strict=True):
        members = np.flatnonzero(mine).tolist()
        if sums == ALLREDUCE and len(members) > 1:
            use = links.sum_of(members)
            summed[use.link] += use.hold * size
        for level, _, card, groups in links.cards:
            of_level[level] += 2 * card * size * (len(np.unique(links.group[level - 1, members])) - 1) / groups
    return float(max((occupied + summed).max(), ready + max(summed.max(), of_level.max())))


def _saved(kept: Floats, compute: Ints, workers: int, n: Any) -> Floats:
    """The peak bytes that each worker saves for backwards; `kept`: bytes of a job, by stage.

    n is None: those of one microbatch, which are all kept when its last forward has ended.
    """
    peak = np.zeros(workers)
    bytes, batches = np.broadcast_to(kept[:, None], compute.shape[1:]), compute.shape[2]
    if n is None:
        job = compute[F] * batches + np.arange(batches)
        of_each = np.bincount(job.ravel(), bytes.ravel(), workers * batches)
        most: Floats = of_each.reshape(workers, batches).max(axis=1)
        return most
    worker = compute[: B + 1].ravel()
    order = np.lexsort((n[: B + 1].ravel(), worker))
    alive = np.cumsum(np.concatenate([bytes.ravel(), -bytes.ravel()])[order])  # each worker's sum ends at 0
    np.maximum.at(peak, worker[order], alive)
    return peak
