"""From the stages of a scheme to those of the file: P parts of each, and T shards of each part.

Part p of stage s is stage m = s P + p of the model. The parts of a stage stand
one behind the other, in the order of edges and of n, on the same worker. Shard
t of the model's stage m is stage m T + t of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import F, Ints
from schedgen.ir.stage_graph import expand_shards
from schedgen.util.errors import UsageError

Edges = tuple[tuple[int, int], ...]


def spread(placement: Ints, parts: int) -> Ints:
    """Workers (D, S, B, T) of the scheme's stages as those of the file's, (D, S P T, B)."""
    directions, stages, microbatches, tensor = placement.shape
    by_shard = np.repeat(np.moveaxis(placement, 3, 2), parts, axis=1)
    return np.ascontiguousarray(by_shard.reshape(directions, stages * parts * tensor, microbatches))


def refine(n: NDArray[np.generic], parts: int, tensor: int) -> NDArray[np.generic]:
    """n (D, S, B) for the file's stages, (D, S P T, B): parts go forwards in their order and backwards in the other."""
    if parts > 1:
        stages = n.shape[1]
        place = np.unique(n, return_inverse=True)[1].reshape(n.shape).astype(np.int64) * parts
        part = np.tile(np.arange(parts), stages)[None, :, None]
        forwards = np.arange(len(n))[:, None, None] == F
        n = np.repeat(place, parts, axis=1) + np.where(forwards, part, parts - 1 - part)
    return np.repeat(n, tensor, axis=1)


def refine_edges(edges: Edges, stages: int, parts: int, tensor: int) -> Edges:
    """The file's edges from those of a scheme: a stage's last part gives what the first of its consumer reads."""
    within = [(s * parts + p, s * parts + p + 1) for s in range(stages) for p in range(parts - 1)]
    between = [(producer * parts + parts - 1, consumer * parts) for producer, consumer in edges]
    return expand_shards(tuple(within + between), tensor)


def refine_apart(apart: Sequence[int], split: NDArray[np.bool_], parts: int, tensor: int) -> tuple[int, ...]:
    """The file's stages whose outputs are apart, from those of a scheme."""
    found = [(stage * parts + parts - 1) * tensor + t for stage in apart for t in range(tensor)]
    for stage in found:
        if split[stage]:
            raise UsageError(
                f"stage {stage // tensor} gives several stages different outputs, so it cannot be split: "
                f"add {stage // tensor} to --whole"
            )
    return tuple(found)


def named(option: str, stages: Collection[int], count: int) -> tuple[int, ...]:
    """Stages of the model that an option names, ascending, each once."""
    for stage in stages:
        if not 0 <= stage < count:
            raise UsageError(f"{option} {stage}: there is no such stage in 0..{count - 1}")
    return tuple(sorted(set(stages)))


def tie_shards(ties: Collection[Sequence[int]], split: Collection[int], tensor: int) -> list[list[int]]:
    """Ties of the file: of the model's ties one a shard, and of each split stage one among its shards."""
    found = [[stage * tensor + t for stage in tie] for tie in ties for t in range(tensor)]
    return found + [[stage * tensor + t for t in range(tensor)] for stage in split]


def exchanges(compute: Ints, split: NDArray[np.bool_], tensor: int) -> set[tuple[int, ...]]:
    """The groups of ranks that add up what the shards of a split stage give."""
    if tensor == 1:
        return set()
    directions, stages, microbatches = compute.shape
    by_shard = compute.reshape(directions, stages // tensor, tensor, microbatches)[:2, split[::tensor]]
    ranks: NDArray[Any] = np.sort(np.moveaxis(by_shard, 2, 3).reshape(-1, tensor), axis=1)
    return {tuple(group) for group in np.unique(ranks, axis=0).tolist()}
