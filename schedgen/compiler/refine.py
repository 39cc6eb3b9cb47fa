"""Refine: divide each stage of a placed scheme into stages of the program: P substages, and T slices of each.

Substage p of stage s is stage m = s P + p of the model, and slice t of that is stage m T + t of the program. Later
steps, ordering and lowering, only know stages of the program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from schedgen.compiler.options import ALL, Jobs
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import F
from schedgen.ir.stage_graph import StageGraph, expand_slices
from schedgen.ir.tensor_parallel import TensorParallel, check_slices_apart
from schedgen.util.arrays import Flags, Ints
from schedgen.util.errors import UsageError


def refine(placed: PlacedScheme) -> PlacedScheme:
    """The placed scheme with the program's stages; UsageError if its slices or ties do not fit."""
    return _slices(_substages(placed))


def _substages(placed: PlacedScheme) -> PlacedScheme:
    """The placed scheme with the model's stages. A stage's substages run on its worker, one after another."""
    P, stages, options = placed.options.substages, placed.graph.stages, placed.options
    n, p = placed.n, np.tile(np.arange(P), stages)[:, None]
    if P > 1:
        rank = np.unique(n, return_inverse=True)[1].reshape(n.shape).astype(np.int64) * P
        backward = np.arange(len(n))[:, None, None] != F
        n = np.repeat(rank, P, axis=1) + np.where(backward, P - 1 - p, p)
    recompute, offload = (
        _named(forwards, stages * P, n.shape[2], placed.scheme.replicas)
        for forwards in (options.recompute, options.offload)
    )
    for s, b in np.argwhere(recompute & offload & (options.offload != ALL))[:1].tolist():
        raise UsageError(f"--offload {s}.{b}: --recompute redoes this forward, so it saves nothing")
    within = [(s * P + k, s * P + k + 1) for s in range(stages) for k in range(P - 1)]
    between = [(producer * P + P - 1, consumer * P) for producer, consumer in placed.graph.edges]
    last = tuple(stage * P + P - 1 for stage in placed.graph.per_consumer)
    return replace(
        placed,
        weights=np.repeat(placed.weights, P, axis=1),
        compute=np.repeat(placed.compute, P, axis=1),
        n=n,
        graph=StageGraph(stages * P, tuple(sorted(within + between)), last),
        caps=None if placed.caps is None else np.repeat(placed.caps, P),
        unsplit_backward=np.repeat(placed.unsplit_backward, P, axis=0),
        delayed_send=np.repeat(placed.delayed_send, P, axis=0) & (p == P - 1),
        recompute=recompute,
        offload=offload,
        tied=tuple(tuple(sorted(tie)) for tie in options.tied),
    )


def _named(forwards: str | Collection[Jobs], stages: int, batches: int, replicas: int) -> Flags:
    """(S, B): the forwards that an option names."""
    named = np.zeros((stages, batches), bool)
    if isinstance(forwards, str):
        kept = 0 if forwards == ALL else replicas  # torchgpipe's words: each replica has one of the last
        named[:, : batches - kept] = True
    else:
        for each in forwards:  # a stage, or a pair of a stage and a microbatch
            named[each] = True
    return named


def _slices(placed: PlacedScheme) -> PlacedScheme:
    """The placed scheme with the program's stages. Slices of a sliced stage are tied: they share uncut parameters."""
    T, stages = placed.options.tensor, placed.graph.stages
    split = ~np.isin(np.arange(stages), [*placed.options.replicated_stages, stages - 1]) & (T > 1)
    for stage in placed.graph.per_consumer:
        if split[stage]:
            raise UsageError(
                f"stage {stage} gives several stages different outputs, so it has no slices: add {stage} to replicated "
                "in the graph"
            )
    ties = [tuple(stage * T + t for stage in tie) for tie in placed.tied for t in range(T)]
    ties += [tuple(stage * T + t for t in range(T)) for stage in np.flatnonzero(split).tolist()]
    compute = _by_slice(placed.compute)
    if T > 1:
        check_slices_apart(compute, T, tuple(placed.cost))
    return replace(
        placed,
        weights=_by_slice(placed.weights),
        compute=compute,
        n=np.repeat(placed.n, T, axis=1),
        graph=StageGraph(
            stages * T,
            expand_slices(placed.graph.edges, T),
            tuple(stage * T + t for stage in placed.graph.per_consumer for t in range(T)),
        ),
        caps=None if placed.caps is None else np.repeat(placed.caps, T),
        unsplit_backward=np.repeat(placed.unsplit_backward, T, axis=0),
        delayed_send=np.repeat(placed.delayed_send, T, axis=0),
        recompute=np.repeat(placed.recompute, T, axis=0),
        offload=np.repeat(placed.offload, T, axis=0),
        tied=tuple(sorted(set(ties))),
        tensor_parallel=TensorParallel(T, tuple(np.flatnonzero(~split).tolist()) if T > 1 else (), stages * T),
    )


def _by_slice(workers: Ints) -> Ints:
    """Workers (D, S, B, T) by stage of the model as workers (D, S T, B) by stage of the program."""
    directions, stages, microbatches, T = workers.shape
    return np.ascontiguousarray(np.moveaxis(workers, 3, 2).reshape(directions, stages * T, microbatches))
