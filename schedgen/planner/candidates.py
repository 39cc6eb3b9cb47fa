"""The schedules that a search tries: every scheme that fits, in every number of replicas and stages.

A pipeline of P workers may run W/P times side by side, each with its share of the microbatches. Or it runs once, on
more than half of the workers, and the others have no layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from schedgen.planner.layer_profile import Layers
from schedgen.planner.partition import partition, prefixes
from schedgen.planner.stage_costs import StageCosts, balanced, smallest, stage_costs
from schedgen.schemes import load
from schedgen.schemes.scheme import Scheme, Sizes
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
    recompute: bool  # of all stages, or none
    scheme: Scheme
    sizes: Sizes
    costs: Sequence[StageCosts]


def with_layers(scheme: Scheme, costs: StageCosts) -> Scheme:
    """The scheme with the number of layers in each stage, by which mpirun cuts the model, and the stages' edges."""
    scheme = scheme._replace(parameters={**scheme.parameters, "layers": list(costs.layer_counts)})
    graph = costs.graph
    return scheme if graph is None else scheme._replace(edges=graph.edges, per_consumer=graph.per_consumer)


def candidates(
    layers: Layers, workers: int, bandwidth: float, microbatches: int, memory: float = math.inf
) -> Iterator[Candidate]:
    """Every candidate on all workers, with and without recomputation.

    With a limit of `memory` bytes a worker, layers are also gathered so that the largest stage needs few bytes.
    """
    count, most = len(layers.names), workers * CHUNKS[-1]
    by_stages = balanced(layers, bandwidth, count if count <= max(most, STAGES[-1]) else most)
    if math.isfinite(memory):
        for ways, costs in zip(by_stages, smallest(layers, bandwidth, len(by_stages)), strict=False):
            if all(costs.layer_counts != other.layer_counts for other in ways):
                ways.append(costs)
    tried = range(1, min(most, len(by_stages)) + 1), count if len(by_stages) == count else 0
    for name, pipeline, replicas in _pipelines(workers, microbatches, *tried):
        try:
            scheme = load(name, pipeline)
        except UsageError:  # such as interleaving where stages do not go round the workers in equal rounds
            continue
        if replicas > 1 and pipeline.groups is None and name not in GROUPED.values():
            scheme = replicated(scheme, replicas, workers // replicas)
        scheme = scheme._replace(workers=workers)  # some workers may have no stage
        sizes = pipeline._replace(microbatches=microbatches, workers=workers)
        for recompute in (False, True):
            yield Candidate(name, replicas, recompute, scheme, sizes, by_stages[sizes.stages - 1])
    best = partition(prefixes(layers), workers, bandwidth)
    if len(best.stages) > 1 and microbatches >= max(best.replicas):
        sizes = Sizes(len(best.stages), microbatches, workers, replicas=best.replicas)
        costs = stage_costs(layers, best.ends, bandwidth)
        for recompute in (False, True):
            yield Candidate("1f1b-rr", best.replicas, recompute, load("1f1b-rr", sizes), sizes, [costs])


def _pipelines(workers: int, microbatches: int, numbers: range, single: int) -> Iterator[tuple[str, Sizes, int]]:
    """(scheme, sizes of one pipeline, number of pipelines), even if the scheme refuses them.

    The stages are one of `numbers`, or `single`, a stage a layer; 0: not tried.
    """
    for D in (D for D in range(1, workers + 1) if workers % D == 0 and microbatches >= D):
        P = workers // D
        if P > 1:
            for name, chunks in PIPELINES.items():
                for stages in _looped(P, chunks, numbers, single):
                    yield name, Sizes(stages, -(-microbatches // D), P), D
        for name, ungrouped in GROUPED.items():
            if P > 1:
                for stages in _looped(P, (1, *CHUNKS), numbers, single):
                    yield name, Sizes(stages, microbatches, workers, D), D
            else:
                for stages in sorted({*(S for S in STAGES if S in numbers), single} - {0}):
                    yield ungrouped, Sizes(stages, microbatches, workers), D
    for P in range(workers - 1, max(1, workers // 2), -1):
        for name, chunks in PIPELINES.items():
            for stages in _looped(P, chunks, numbers, single):
                yield name, Sizes(stages, microbatches, P), 1


def _looped(workers: int, chunks: Sequence[int], numbers: range, single: int) -> list[int]:
    """The stages of a scheme of so many a worker: one of `numbers`, or `single`."""
    each = range(chunks[0], chunks[-1] + 1)
    return [workers * v for v in each if workers * v == single or (v in chunks and workers * v in numbers)]


def replicated(scheme: Scheme, replicas: int, workers: int) -> Scheme:
    """D replicas of a scheme of `workers` side by side: microbatch b is number b // D of replica b mod D."""
    D = replicas

    def w(s: Any, b: Any, d: Any) -> Any:
        weights, compute = scheme.w(s, b // D, d)
        return weights + workers * (b % D), compute + workers * (b % D)

    def of_replica(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return function and (lambda s, b: function(s, b // D))

    return scheme._replace(
        workers=D * workers,
        w=w,
        n=lambda s, b, d: scheme.n(s, b // D, d),
        unsplit_backward=of_replica(scheme.unsplit_backward),
        delayed_send=of_replica(scheme.delayed_send),
        parameters={**scheme.parameters, "replicas": D},
    )
