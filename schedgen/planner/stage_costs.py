"""Layers gathered into stages: what each stage costs in the simulator, and the cuts that balance S stages.

Whatever simulates a schedule with a profile reads it by `read_profile`, so that a plan's file has its costs.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.cost import REDO, Amount, by_stage, own_costs, with_halves
from schedgen.ir.graph_file import ModelGraph, read_graph_file
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import StageGraph, chain
from schedgen.planner.layer_profile import Edge, Layers, listed, parse_json
from schedgen.planner.partition import prefixes, unreplicated
from schedgen.simulator.machine import Machine, by_direction, parse_profile, workspaces
from schedgen.util.arrays import Floats, Ints
from schedgen.util.errors import UsageError
from schedgen.util.files import AnyPath, display_name, read_json, read_text

SHORTEST = 1e-5  # the least time of a stage's job, as a share of the longest job's


class StageCosts(NamedTuple):
    """The costs of S stages that follow each other in the order of the layers."""

    layer_counts: tuple[int, ...]  # by stage
    times: Mapping[str, Floats]  # direction (F and B, or F, I and W, or all), maybe R -> seconds by stage
    machine: Machine  # bytes by stage
    passed_on: Floats  # (S - 1,) bytes from each stage to the next
    graph: ModelGraph | None = None  # None: a chain, without ties

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """The stages that share parameters, by tie."""
        return () if self.graph is None else self.graph.tied

    def durations(self, split: bool) -> dict[str, Floats]:
        """Seconds by stage of a schedule's directions, and R if there is one."""
        return own_costs(self.with_halves, 3 if split else 2)

    @property
    def with_halves(self) -> dict[str, Any]:
        """All seconds by stage; halves that were not measured each take half of B."""
        return with_halves(self.times)


def read_profile(file: AnyPath, program: Program, graph: AnyPath | None = None) -> tuple[dict[str, Amount], Machine]:
    """The durations of a schedule's jobs, seconds by direction and stage, and the machine, from the file of a profile.

    Where the schedule's stages join layers and the profile is of these, they are joined as `plan` joins them; `graph`:
    the file with that of the layers. RefusedFile if a file is none, UsageError if it does not fit the schedule.
    """
    text, name, header = read_text(file), display_name(file), program.header
    counts = header.scheme.get("layers", ())
    if len(counts) < sum(counts) == listed(read_json(text, name)) and not header.tensor_parallel:
        layers = parse_json(text, name, read_graph_file(graph))
        costs = stage_costs(layers, list(accumulate(counts)))
        made = costs.graph or ModelGraph(header.stages, chain(header.stages))
        in_file = header.graph.edges, header.graph.per_consumer, () if header.is_forward else header.tied
        if (made.edges, made.per_consumer, () if header.is_forward else made.tied) != in_file:
            raise UsageError(f"the schedule's stages have other edges or ties than those of {name}: give its --graph")
        return costs.with_halves, costs.machine
    if graph is not None:
        raise UsageError(f"--graph is of layers, but the schedule does not join those of {name}: leave it out")
    times, machine = parse_profile(text, name, header.stages, header.graph.edges, header)
    if counts and "B" in times:
        by_stage_times = {name: by_stage(seconds, header.stages) for name, seconds in times.items()}
        return with_halves(_not_too_short(by_stage_times)), machine
    return times, machine


def _not_too_short(times: Mapping[str, Floats]) -> dict[str, Floats]:
    shortest = SHORTEST * max(float(seconds.max()) for seconds in times.values())
    return {name: seconds if name == REDO else np.maximum(seconds, shortest) for name, seconds in times.items()}


def balanced(layers: Layers, bandwidth: float, most: int) -> list[list[StageCosts]]:
    """For 1, 2, ... `most` stages: the costs of the cuts with the fastest slowest stage, and of those with the fastest
    slowest stage or transfer; one entry if these agree.
    """
    cuts = prefixes(layers)
    ways = [unreplicated(cuts, math.inf, most), unreplicated(cuts, bandwidth, most)]
    distinct = [dict.fromkeys(partition.ends for partition in partitions) for partitions in zip(*ways, strict=True)]
    return [[stage_costs(layers, ends) for ends in of_count] for of_count in distinct]


def for_speeds(layers: Layers, speeds: Sequence[float]) -> StageCosts:
    """The costs of the cut with the fastest slowest stage on workers of these speeds, by stage."""
    cuts = prefixes(layers)
    seconds = cuts.seconds - cuts.seconds[:, None]  # from the first cut to the second
    seconds[np.tril_indices(len(seconds))] = math.inf
    slowest, begins = seconds[0] / speeds[0], list[Ints]()  # by cut that ends the stages so far
    for speed in speeds[1:]:
        ways = np.maximum(slowest[:, None], seconds / speed)
        slowest, begins = ways.min(axis=0), [*begins, ways.argmin(axis=0)]
    ends = [len(seconds) - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return stage_costs(layers, [int(cuts.end[cut]) for cut in reversed(ends)])


def smallest(layers: Layers, most: int) -> list[StageCosts]:
    """As `balanced`: the cuts whose largest stage needs the fewest bytes for its weights and one microbatch."""
    cuts = prefixes(layers)
    needed = np.cumsum([0.0, *(layers.owned + layers.weight + layers.kept)])[cuts.end]
    ways = unreplicated(cuts._replace(seconds=needed), math.inf, most)
    return [stage_costs(layers, way.ends) for way in ways]


def stage_costs(layers: Layers, ends: Sequence[int]) -> StageCosts:
    """The costs of stages that end at cuts `ends`.

    Activations between layers inside a stage are saved from forward to backward, and their gradients are alive while
    the backward runs. A stage has the overhead of one of its layers, the one with the most.
    """
    machine, count, begins = layers.machine, len(layers.names), [0, *ends[:-1]]
    spans = list(zip(begins, ends, strict=True))
    half, step, saved = (by_stage(amount, count) for amount in (machine.half, machine.step, machine.saved))
    outputs = np.array([layers.activation[i:j].sum() for i, j in spans])
    graph: ModelGraph | None = None
    by_edge: Mapping[Edge, float] = {}
    if layers.graph is None:  # what crosses a cut goes from stage to stage
        # A layer before the stage may have outputs that cross the cut after it, too; these are not the stage's own. The
        # last layer's output leaves, too.
        last = {count - 1}
        read = [{a for a, b in layers.edges if i <= a < j <= b} | (last if j == count else set()) for i, j in spans]
        leaving = np.array([layers.activation[sorted(own)].sum() for own in read])
        x = layers.crossing[list(ends)]
        x[-1] = layers.activation[-1]
        passed_on = x[:-1]
    else:
        graph, by_edge, sent = joined_graph(layers, layers.graph, ends)
        x = leaving = np.array([*sent[:-1], layers.activation[-1]])
        passed_on = np.array([by_edge[s, s + 1] for s in range(len(spans) - 1)])
    widest = np.array([layers.activation[i : j - 1].max(initial=0) for i, j in spans])

    total = partial(np.add.reduceat, indices=begins)
    workspace: dict[str, Amount] = {}
    for direction, amount in workspaces(machine).items():
        largest = np.maximum.reduceat(by_stage(amount, count), begins)
        workspace[direction] = largest + (2 * widest if direction in "BI" else 0)
    overhead, times = by_direction(machine.overhead), dict[str, Floats]()
    for direction, seconds in layers.times.items():
        once = by_stage(overhead.get("F" if direction == REDO else direction, 0), count)
        once = np.minimum(once, seconds)  # R may be less than F's overhead
        times[direction] = total(seconds - once) + np.maximum.reduceat(once, begins)
    return StageCosts(
        tuple(j - i for i, j in spans),
        _not_too_short(times),
        machine._replace(
            activation=x,
            weight=total(layers.weight),
            saved=total(saved) + np.maximum(outputs - leaving, 0),
            half=total(half),
            freed=None if machine.freed is None else total(by_stage(machine.freed, count)),
            workspace=workspace,
            owned=total(layers.owned),
            step=total(step),
            overhead=0,
            edge_activation=np.array([*by_edge.values()]) if graph and graph.per_consumer else None,
            tied=None if machine.tied is None else _shared(layers, ends, machine.tied),
        ),
        passed_on,
        graph,
    )


def joined_graph(
    layers: Layers, graph: ModelGraph, ends: Sequence[int]
) -> tuple[ModelGraph, dict[Edge, float], list[float]]:
    """The graph of stages that end at cuts `ends`, from that of the layers; and the bytes that stages send.

    The bytes are, by edge of the graph and in its order, those sent along it; and by stage, those of all its outputs
    that later stages read. Where a layer has an output per consumer, these are taken to read nothing in common.
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
    return joined, by_edge, [sum(values.values()) for values in sent]


def _shared(layers: Layers, ends: Sequence[int], sizes: Floats) -> Floats:
    """By tie of the stages that end at cuts `ends`, in the order of `joined_graph`: what they share.

    `sizes`: what the layers share, by tie.
    """
    ties = layers.graph.tied if layers.graph else ()
    shared: dict[tuple[int, ...], float] = {}
    for tie, size in zip(ties, sizes, strict=True):
        stages = tuple(sorted({bisect(ends, layer) for layer in tie}))
        shared[stages] = shared.get(stages, 0) + size
    return np.array([size for stages, size in sorted(shared.items()) if len(stages) > 1])


def cost_ratios(durations: dict[str, Floats]) -> dict[str, float]:
    """The mean duration of each direction's jobs in units of F, to four digits: the costs by which greedy orders."""
    forward = float(durations["F"].sum())
    ratios = {name: float(f"{max(seconds.sum() / forward, 1e-3):.4g}") for name, seconds in durations.items()}
    return {name: int(ratio) if ratio.is_integer() else ratio for name, ratio in ratios.items()}
