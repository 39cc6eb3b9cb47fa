"""Where a graph of layers can be cut in two: its downsets, and what the layers of each cost together.

A downset is a set of layers that contains, with a layer, all layers whose outputs that layer reads; a cut lies between
a downset and the rest. Downsets are the states of PipeDream's antichain DAG, which names each by its layers that no
other layer in it reads [Narayanan et al. 2019, PipeDream, section 3.1; optimizer]. A chain of N layers has N + 1.

Layers that cost nothing make no cut of their own: a source goes with the first stage, a sink with the only layer that
it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedgen.ir.stage_graph import StageGraph
from schedgen.planner.layer_profile import Edge, Layers
from schedgen.util.arrays import Flags, Floats

MOST_DOWNSETS = 2**12 + 1  # as many as the longest chain has


class Downsets(NamedTuple):
    """n downsets of N layers by size: the first is empty, the last has all layers. Cut k comes after downset k."""

    members: Flags  # (n, N): the layers of each
    seconds: Floats  # (n,) of their forwards and backwards
    weight: Floats  # (n,) bytes
    kept: Floats  # (n,) bytes of a minibatch between forward and backward
    crossing: Floats  # (n,) bytes of the outputs that layers after the cut read
    contains: Flags  # (n, n): contains[j, i]: j has all layers of i, and more
    complete: bool  # False: these are the prefixes of one order, by choice or since there are more than MOST_DOWNSETS


def all_downsets(layers: Layers) -> Downsets:
    """All downsets, or the prefixes of one order if there are more than MOST_DOWNSETS."""
    heads = _heads(layers)
    units = [unit for unit, head in enumerate(heads) if head == unit]  # heads of groups: what cuts can separate
    number = {unit: k for k, unit in enumerate(units)}
    edges = {(number[heads[a]], number[heads[b]]) for a, b in layers.edges if heads[a] >= 0 and heads[a] != heads[b]}
    masks = _closed_sets(len(units), sorted(edges))
    if masks is None:
        of_units = np.tri(len(units) + 1, len(units), -1, dtype=bool)
    else:
        size = -(-len(units) // 8)
        packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), np.uint8)
        of_units = np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, : len(units)].astype(bool)
    members = np.zeros((len(of_units), len(heads)), bool)
    for layer, head in enumerate(heads):
        members[:, layer] = of_units[:, number[head]] if head >= 0 else of_units.any(axis=1)
    return _with_costs(layers, members, masks is not None)


def prefixes(layers: Layers) -> Downsets:
    """The downsets along the order of the layers: the k-th has the first k layers."""
    count = len(layers.names)
    return _with_costs(layers, np.tri(count + 1, count, -1, dtype=bool), False)


def _with_costs(layers: Layers, members: Flags, complete: bool) -> Downsets:
    crossing = np.zeros(len(members))
    for layer, readers in enumerate(StageGraph(len(layers.names), layers.edges).consumers):
        if layers.activation[layer] and readers:
            crossing[members[:, layer] & ~members[:, readers].all(axis=1)] += layers.activation[layer]
    ones = members.astype(np.float64)
    seconds, weight, kept = (ones @ amount for amount in (layers.seconds, layers.weight, layers.kept))
    missing = (~members).astype(np.float32) @ members.astype(np.float32).T  # [j, i]: how many of i's layers j lacks
    contains: Flags = missing == 0
    np.fill_diagonal(contains, False)
    return Downsets(members, seconds, weight, kept, crossing, contains, complete)


def _heads(layers: Layers) -> list[int]:
    """By layer, the head of its group, which is on one side of every cut; -1: the group goes with the first stage."""
    graph = StageGraph(len(layers.names), layers.edges)
    free = (layers.seconds == 0) & (layers.weight == 0) & (layers.kept == 0)
    heads = list(range(graph.stages))
    for layer, inputs in enumerate(graph.producers):
        if free[layer] and not inputs:
            heads[layer] = -1
        elif free[layer] and len(inputs) == 1 and not graph.consumers[layer]:
            heads[layer] = heads[inputs[0]]
    return heads


def _closed_sets(count: int, edges: Sequence[Edge]) -> list[int] | None:
    """The downsets of nodes 0..count-1 as bit masks, smallest first; None if there are more than MOST_DOWNSETS.

    `edges` lead from smaller to larger nodes.
    """
    if set(itertools.pairwise(range(count))) <= set(edges):
        return [(1 << size) - 1 for size in range(count + 1)]
    producers = [0] * count
    consumers: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        producers[b] |= 1 << a
        consumers[a].append(b)
    masks = [0]
    largest = {0: tuple(node for node in range(count) if not producers[node])}  # mask -> nodes that can join it
    while largest:
        larger: dict[int, tuple[int, ...]] = {}
        for mask, ready in largest.items():
            for node in ready:
                grown = mask | 1 << node
                if grown not in larger:
                    freed = (reader for reader in consumers[node] if not producers[reader] & ~grown)
                    larger[grown] = tuple(sorted({*ready, *freed} - {node}))
                    if len(masks) + len(larger) > MOST_DOWNSETS:
                        return None
        masks += sorted(larger)
        largest = larger
    return masks
