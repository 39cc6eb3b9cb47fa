"""The ways to cut a graph of layers in two: every set of layers that has with a layer all that it reads.

These sets are the states of PipeDream's antichain DAG, each given there by the
layers of it that nobody in it reads. Of a chain of N layers there are N + 1.
Layers that cost nothing at all are not asked for: a source goes with the first
stage, a sink with the one layer that it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.planner.layer_profile import Edge, Layers, Numbers

MOST_CUTS = 2**12 + 1  # as many as the longest chain has

Flags = NDArray[np.bool_]


class Cuts(NamedTuple):
    """n cuts by the number of layers before them: the first has none, the last all. What lies before them:"""

    layers: Flags  # (n, N)
    seconds: Numbers  # (n,) of their forwards and backwards
    weight: Numbers  # (n,) bytes
    kept: Numbers  # (n,) bytes of a minibatch between forward and backward
    crossing: Numbers  # (n,) bytes of the outputs that are read behind the cut
    follows: Flags  # (n, n) follows[k, j]: k's layers are some of j's, but not all
    every: bool  # False: there are more than MOST_CUTS, and these are those of one order of the layers


def cuts(layers: Layers) -> Cuts:
    """All cuts, or those of one order of the layers where they are too many."""
    heads = _heads(layers)
    units = [unit for unit, head in enumerate(heads) if head == unit]  # what is cut: the head of each group of layers
    number = {unit: at for at, unit in enumerate(units)}
    edges = {(number[heads[a]], number[heads[b]]) for a, b in layers.edges if heads[a] >= 0 and heads[a] != heads[b]}
    found = _closed(len(units), sorted(edges))
    if found is None:
        before = np.tri(len(units) + 1, len(units), -1, dtype=bool)
    else:
        size = -(-len(units) // 8)
        packed = np.frombuffer(b"".join(one.to_bytes(size, "little") for one in found), np.uint8)
        before = np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, : len(units)].astype(bool)
    members = np.zeros((len(before), len(heads)), bool)
    for layer, head in enumerate(heads):
        members[:, layer] = before[:, number[head]] if head >= 0 else before.any(axis=1)
    return _cuts(layers, members, found is not None)


def in_order(layers: Layers) -> Cuts:
    """The cuts of the layers' order: before the k-th lie the first k layers."""
    count = len(layers.names)
    return _cuts(layers, np.tri(count + 1, count, -1, dtype=bool), False)


def _cuts(layers: Layers, members: Flags, every: bool) -> Cuts:
    crossing = np.zeros(len(members))
    consumers: list[list[int]] = [[] for _ in layers.names]
    for producer, consumer in layers.edges:
        consumers[producer].append(consumer)
    for layer, readers in enumerate(consumers):
        if layers.activation[layer] and readers:
            crossing[members[:, layer] & ~members[:, readers].all(axis=1)] += layers.activation[layer]
    one = members.astype(np.float64)
    return Cuts(
        members, one @ layers.seconds, one @ layers.weight, one @ layers.kept, crossing, _follows(members), every
    )


def _heads(layers: Layers) -> list[int]:
    """By layer: the layer that it always lies with; itself, or -1 for the first stage."""
    read: list[list[int]] = [[] for _ in layers.names]
    consumed = {producer for producer, _ in layers.edges}
    for producer, consumer in layers.edges:
        read[consumer].append(producer)
    free = (layers.seconds == 0) & (layers.weight == 0) & (layers.kept == 0)
    heads = list(range(len(read)))
    for layer, producers in enumerate(read):
        if free[layer] and not producers:
            heads[layer] = -1
        elif free[layer] and len(producers) == 1 and layer not in consumed:
            heads[layer] = heads[producers[0]]
    return heads


def _closed(count: int, edges: Sequence[Edge]) -> list[int] | None:
    """All sets of 0..count-1 with the producers of what is in them, as bits, smallest first; None: more than MOST_CUTS.

    `edges` lead upwards.
    """
    if set(itertools.pairwise(range(count))) <= set(edges):
        return [(1 << size) - 1 for size in range(count + 1)]
    producers = [0] * count
    consumers: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        producers[b] |= 1 << a
        consumers[a].append(b)
    found = {0: tuple(one for one in range(count) if not producers[one])}  # a set, and what could be next in it
    last, every = found, [0]
    while last:
        following: dict[int, tuple[int, ...]] = {}
        for one, ready in last.items():
            for new in ready:
                larger = one | 1 << new
                if larger not in following:
                    freed = (other for other in consumers[new] if not producers[other] & ~larger)
                    following[larger] = tuple(sorted({*ready, *freed} - {new}))
                    if len(every) + len(following) > MOST_CUTS:
                        return None
        every += sorted(following)
        last = following
    return every


def _follows(before: Flags) -> Flags:
    """Whether one set is a part of another, for all pairs."""
    outside = before.astype(np.float32) @ (~before).astype(np.float32).T  # how many of k's layers j has not
    part: Flags = outside == 0
    np.fill_diagonal(part, False)
    return part
