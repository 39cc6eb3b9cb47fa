"""The graph of stages that join layers: which stages read which, how many bytes, and which of them are tied."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from schedgen.ir.graph_file import ModelGraph
from schedgen.ir.stage_graph import StageGraph
from schedgen.planner.layer_profile import Edge, Layers


class Joined(NamedTuple):
    """The graph of stages, and the bytes that they send."""

    graph: ModelGraph
    by_edge: Mapping[Edge, float]  # bytes that go along each edge, in the graph's order
    leaving: list[float]  # by stage: bytes of all that later stages read of it


def joined_graph(layers: Layers, graph: ModelGraph, ends: Sequence[int]) -> Joined:
    """The graph of stages that end at cuts `ends`, from that of the layers.

    Where a layer is apart, its consumers are taken to read nothing in common.
    """
    stage_of = [bisect(ends, layer) for layer in range(graph.stages)]
    sizes = layers.machine.edge_bytes(StageGraph(graph.stages, layers.edges, graph.per_consumer))
    read: dict[Edge, dict[Edge, float]] = {}  # by edge of the stages: the values that go along it, and their bytes
    for (producer, consumer), size in zip(layers.edges, sizes.tolist(), strict=True):
        edge = stage_of[producer], stage_of[consumer]
        if edge[0] != edge[1]:
            reader = consumer if producer in graph.per_consumer else -1
            read.setdefault(edge, {})[producer, reader] = size
    by_producer: dict[int, set[frozenset[Edge]]] = {}
    sent: list[dict[Edge, float]] = [{} for _ in ends]
    for (stage, _), values in read.items():
        by_producer.setdefault(stage, set()).add(frozenset(values))
        sent[stage] |= values
    ties = {tuple(sorted({stage_of[layer] for layer in tie})) for tie in graph.tied}
    joined = ModelGraph(
        len(ends),
        tuple(sorted(read)),
        tuple(stage for stage, outputs in sorted(by_producer.items()) if len(outputs) > 1),
        tuple(sorted(tie for tie in ties if len(tie) > 1)),
    )
    by_edge = {edge: sum(values.values()) for edge, values in sorted(read.items())}
    return Joined(joined, by_edge, [sum(values.values()) for values in sent])
