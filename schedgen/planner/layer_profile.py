"""Layers and what they cost, read from a profile in PipeDream's format or in the JSON that `mpirun profile` writes.

PipeDream's profiler writes one line for each layer and, after these, one line for each edge, which begins with a tab:

    node2 -- ReLU -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=64.0, parameter_size=0.0
        node1 -- node2

Times are milliseconds and sizes are bytes, rounded up to whole numbers. An activation_size may be a list in brackets,
which stands for its sum. As in PipeDream's optimizer an input costs nothing, nor does a __getitem__ that no layer
reads, because it is a part of its layer's output. The order of the layers is that of the numbers in their names.

In the JSON each stage is a layer, so a model is profiled with as many stages as it may be cut into. They are a chain,
unless a graph file of the same stages says which stages read others besides the one before, and which are tied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from schedgen.ir.cost import REDO, by_stage
from schedgen.ir.graph_file import ModelGraph, read_graph_file
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.stage_graph import chain
from schedgen.ir.version_1 import from_version_1
from schedgen.simulator.machine import Machine, parse_profile
from schedgen.util.arrays import Floats
from schedgen.util.errors import RefusedFile, UsageError, clip
from schedgen.util.files import AnyPath, display_name, read_json, read_text

Edge = tuple[int, int]

MOST_BYTES = 2**26  # of a file
MOST_PROFILED = 2**12  # layers of a file
MOST_EDGES = 2**17

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_LAYER = re.compile(
    r"(\S+) -- (.*) -- forward_compute_time=([^,]*), backward_compute_time=([^,]*), activation_size=([^,]*), "
    r"parameter_size=(\S*)(?: -- stage_id=\S*)?"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)")


class Layers(NamedTuple):
    """N layers in a topological order, and what a minibatch costs in each."""

    names: tuple[str, ...]
    edges: tuple[Edge, ...]  # (producer, consumer)
    times: Mapping[str, Floats]  # direction (F and B, or F, I and W, or all) -> seconds by layer
    machine: Machine  # bytes by layer; alpha and beta are 0 if the file does not give them
    graph: ModelGraph | None = None  # the graph of the profiled stages; None: a chain

    @property
    def seconds(self) -> Floats:
        """Seconds of forward and backward together, shape (N,)."""
        names = DIRECTIONS[2 if "B" in self.times else 3]
        return sum((self.times[name] for name in names), np.zeros(len(self.names)))

    @property
    def activation(self) -> Floats:
        """Bytes of each layer's output, shape (N,)."""
        return by_stage(self.machine.activation, len(self.names))

    @property
    def weight(self) -> Floats:
        """Bytes of each layer's parameters, shape (N,)."""
        return by_stage(self.machine.weight, len(self.names))

    @property
    def owned(self) -> Floats:
        """Bytes that an owner of each layer holds throughout, shape (N,)."""
        owned = self.machine.owned
        return self.weight if owned is None else by_stage(owned, len(self.names))

    @property
    def kept(self) -> Floats:
        """Bytes that a minibatch keeps from forward to backward: the output and what is saved, shape (N,)."""
        return self.activation + by_stage(self.machine.saved, len(self.names))

    @property
    def crossing(self) -> Floats:
        """Bytes of the outputs of the first k layers that later layers read, by k, shape (N + 1,)."""
        last_reader = np.arange(len(self.names))
        for producer, consumer in self.edges:
            last_reader[producer] = max(last_reader[producer], consumer)
        crossing = np.zeros(len(self.names) + 1)
        for layer, (size, reader) in enumerate(zip(self.activation, last_reader, strict=True)):
            crossing[layer + 1 : reader + 1] += size
        return crossing


def read_layers(file: AnyPath, graph: AnyPath | None = None) -> Layers:
    """The layers in the file of a profile; RefusedFile, with the line, if it has neither of the two formats.

    `graph`: the file with the graph of the profiled stages; UsageError if it does not fit the profile.
    """
    text, name = read_text(file, MOST_BYTES), display_name(file)
    if text.lstrip()[:1] in ("{", "["):
        layers = parse_json(text, name, read_graph_file(graph))
    elif graph is None:
        layers = _parse_pipedream(text, name)
    else:
        raise UsageError(f"{name} has a graph of its own: leave --graph out")
    if not layers.seconds.sum() > 0:
        raise RefusedFile(f"{name}: none of its layers takes any time")
    return layers


def listed(values: object) -> int:
    """How many layers a profile, which was JSON, has numbers for: those in its first list; 1 if it has none."""
    given = values.items() if isinstance(values, dict) else ()
    return next(
        (len(value) for key, value in given if isinstance(value, list) and key not in ("per_consumer", "tied")), 1
    )


def parse_json(text: str, name: str, graph: ModelGraph | None) -> Layers:
    """The layers in the JSON of a profile; as `read_layers`."""
    values = read_json(from_version_1(text), name)
    count = listed(values)
    if not 1 <= count <= MOST_PROFILED:
        raise RefusedFile(f"{name}: {count} layers, but a plan is for 1 to {MOST_PROFILED}")
    if graph is None and isinstance(values, dict) and "per_consumer" in values:
        raise RefusedFile(f"{name}: it has per_consumer, sizes of outputs per consumer: give the stages' --graph, too")
    if graph is not None:
        _check_graph(graph, count, name)
    edges = chain(count) if graph is None or graph.edges is None else graph.edges
    ties = 0 if graph is None else len(graph.tied)
    times, machine = parse_profile(text, name, count, edges, counted="its first list is of", ties=ties)
    if len(times.keys() - {REDO}) < 2:
        raise RefusedFile(f"{name}: a plan needs backwards: give B, or I and W, beside F")
    by_layer = {direction: by_stage(seconds, count) for direction, seconds in times.items()}
    return Layers(tuple(map(str, range(count))), edges, by_layer, machine, graph)


def _check_graph(graph: ModelGraph, count: int, name: str) -> None:
    if graph.stages != count:
        raise UsageError(f"the graph has {graph.stages} stages, but {name} has {count}")
    if any(len(set(tie)) < 2 for tie in graph.tied):
        raise UsageError("the graph has a tie of one stage: a tie is of two or more")
    if graph.layers:
        raise UsageError("the graph has layers, which a plan chooses: leave them out")
    if graph.edges is not None and (missing := set(chain(count)) - set(graph.edges)):
        producer, consumer = min(missing)
        raise UsageError(
            f"plan needs a graph whose stages all read the one before: stage {consumer} does not read stage {producer}"
        )


def _parse_pipedream(text: str, name: str) -> Layers:
    nodes: dict[str, tuple[str, list[float]]] = {}  # by name: a layer's description, and its numbers as _FIELDS
    edges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.startswith("\t"):
                edges[_parse_edge(line.rstrip(), nodes)] = None
            elif line.strip():
                layer, description, numbers = _parse_layer(line.rstrip())
                if layer in nodes:
                    raise ValueError(f"{clip(layer)} is listed twice")
                nodes[layer] = description, numbers
            for entries, limit, plural in ((nodes, MOST_PROFILED, "layers"), (edges, MOST_EDGES, "edges")):
                if len(entries) > limit:
                    raise ValueError(f"more than {limit} {plural}")
        except ValueError as error:
            raise RefusedFile(f"{name}:{number}: {error}") from None
    split = re.compile("([0-9]{1,18})").split
    order = sorted(nodes, key=lambda name: [int(x) if k % 2 else x for k, x in enumerate(split(name))])  # node2, node10
    index = {layer: k for k, layer in enumerate(order)}
    for producer, consumer in edges:
        if index[producer] >= index[consumer]:
            raise RefusedFile(f"{name}: the edge {clip(producer)} -- {clip(consumer)} leads to an earlier layer")
    producers, consumers = {a for a, _ in edges}, {b for _, b in edges}
    table = np.zeros((len(order), len(_FIELDS)))
    for k, layer in enumerate(order):
        description, numbers = nodes[layer]
        is_input = description.startswith("Input") and layer not in consumers
        is_unread_part = description.startswith("__getitem__") and layer not in producers
        table[k] = 0.0 if is_input or is_unread_part else numbers
    forward, backward, activation, weight = table.T.copy()
    activation, saved = np.ceil(activation), np.zeros(len(order))
    saved[-1:], activation[-1:] = activation[-1:], 0  # the last layer's goes to the loss, and stays for the backward
    return Layers(
        tuple(order),
        tuple(sorted((index[a], index[b]) for a, b in edges)),
        {"F": forward / 1e3, "B": backward / 1e3},
        Machine(activation=activation, weight=np.ceil(weight), saved=saved),
    )


def _parse_layer(line: str) -> tuple[str, str, list[float]]:
    match = _LAYER.fullmatch(line)
    if match is None:
        form = f"NAME -- DESCRIPTION -- {'=..., '.join(_FIELDS)}=..."
        raise ValueError(f"not a layer, {form}, nor an edge: '{clip(line)}'")
    numbers = []
    for field, text in zip(_FIELDS, match.groups()[2:], strict=True):
        parts = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
        try:
            value = math.fsum(map(float, parts))
        except (ValueError, OverflowError):
            value = -1.0
        if not 0 <= value < 1e18:
            raise ValueError(f"{field} should be a number from 0 to 1e18, not '{clip(text)}'")
        numbers.append(value)
    return match[1], match[2], numbers


def _parse_edge(line: str, nodes: Collection[str]) -> tuple[str, str]:
    match = _EDGE.fullmatch(line)
    if match is None:
        raise ValueError(f"not an edge, a tab and NAME -- NAME: '{clip(line.strip())}'")
    for layer in match.groups():
        if layer not in nodes:
            raise ValueError(f"no layer above is called '{clip(layer)}'")
    return match[1], match[2]
