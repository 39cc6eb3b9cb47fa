"""Shards of stages: a profile of the model applied to them, and what memory their sums need."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.cost import is_amount
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Numbers

# The entries of a profile that are as large for a shard as for its stage.
_UNDIVIDED = ("activation", "alpha", "beta", "overhead")


def profile_of_shards(profile: dict[str, Any], header: Header) -> dict[str, Any]:
    """A profile whose lists have a number for every stage (apart: edge) of the model, for the shards of a schedule.

    In lists, a shard of a split stage gets a T-th of everything but `_UNDIVIDED` and apart: times, weights, memory.
    """
    T, stages, edges = header.tensor_parallel.degree, header.model_stages, header.unsharded_graph.edges
    if T == 1:
        return profile

    def of_shards(value: Any, divided: bool) -> Any:
        if isinstance(value, dict):
            return {key: of_shards(amount, divided) for key, amount in value.items()}
        if not isinstance(value, list) or len(value) != stages or not all(map(is_amount, value)):
            return value
        parts = [T if divided and header.tensor_parallel.split[stage * T] else 1 for stage in range(stages)]
        return [amount / part for amount, part in zip(value, parts, strict=True) for _ in range(T)]

    expanded = {
        key: value if key == "apart" else of_shards(value, key not in _UNDIVIDED) for key, value in profile.items()
    }
    if isinstance(by_edge := profile.get("apart"), list) and len(by_edge) == len(edges):
        sizes = dict(zip(edges, by_edge, strict=True))
        expanded["apart"] = [sizes[producer // T, consumer // T] for producer, consumer in header.graph.edges]
    return expanded


def summed_parts(header: Header, outputs: Numbers) -> set[tuple[int, tuple[int, ...], int]]:
    """(rank, ranks of the shards it adds up with in the shards' order, bytes of its part) of every sum.

    Equal entries share one scratch buffer. `outputs`: bytes of x and g, by stage and then by edge.
    """
    entries: set[tuple[int, tuple[int, ...], int]] = set()
    producer, consumer = np.array(header.graph.edges, np.int64).reshape(-1, 2).T
    names = np.array([header.graph.gradient_consumer(*edge) for edge in header.graph.edges], np.int64)
    gradients: dict[int, list[int]] = {}  # by stage: bytes of those that its backward gives
    by_edge = outputs[header.graph.size_columns(producer, names)]
    for stage, size in zip(consumer.tolist(), by_edge.tolist(), strict=True):
        gradients.setdefault(stage, []).append(size)
    for stage in np.flatnonzero(header.tensor_parallel.split).tolist():
        shards = header.shards_of(stage)
        given = (F, [int(outputs[stage])]), (B, gradients.get(stage, []))
        for d, parts in given[: len(header.compute)]:
            for ranks in set(map(tuple, header.compute[d, shards.start : shards.stop].T.tolist())):
                entries |= {(ranks[shards.index(stage)], ranks, size) for size in parts}
    return entries
