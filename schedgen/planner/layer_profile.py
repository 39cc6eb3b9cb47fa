"""Layers and what they cost, read from a file: PipeDream's own format, or the JSON that `mpirun profile` writes.

PipeDream's profiler writes a line a layer and, behind them, a line an edge,
which begins with a tab:

    node2 -- ReLU -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=64.0, parameter_size=0.0
        node1 -- node2

Times are milliseconds, sizes are bytes; an activation_size may be a list in
brackets, which is its sum. As in PipeDream's optimizer an input costs nothing,
and so does a __getitem__ that nobody reads: it is a part of what its layer gives.

In the JSON each stage is a layer, in a chain, so a model is profiled with as
many stages as it may be cut into.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.cost import Amount, by_stage
from schedgen.simulator.cost import Machine, read_profile
from schedgen.util.errors import RefusedFile, UsageError, clip
from schedgen.util.files import display_name, read_text

Numbers = NDArray[np.float64]
Edge = tuple[int, int]

MOST_BYTES = 2**26  # of a file
MOST_LAYERS = 2**12
MOST_EDGES = 2**17

_NAMES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_LAYER = re.compile(
    r"(\S+) -- (.*) -- forward_compute_time=([^,]*), backward_compute_time=([^,]*), activation_size=([^,]*), "
    r"parameter_size=(\S*)(?: -- stage_id=\S*)?"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)")


class Layers(NamedTuple):
    """N layers in a topological order, and what one minibatch costs in each."""

    names: tuple[str, ...]
    edges: tuple[Edge, ...]  # (producer, consumer)
    times: Mapping[str, Numbers]  # seconds of F and B, or of F, I and W, by layer
    machine: Machine  # bytes by layer; alpha and beta are 0 where the file does not say

    @property
    def seconds(self) -> Numbers:
        """Of forward and backward together, shape (N,)."""
        return sum(self.times.values(), np.zeros(len(self.names)))

    @property
    def activation(self) -> Numbers:
        return by_stage(self.machine.activation, len(self.names))

    @property
    def weight(self) -> Numbers:
        return by_stage(self.machine.weight, len(self.names))

    @property
    def kept(self) -> Numbers:
        """Bytes of a minibatch between its forward and its backward, weights apart: the output, and what is saved."""
        return self.activation + by_stage(self.machine.saved, len(self.names))


def read_layers(name: str) -> Layers:
    """The layers in the file `name`. Raises RefusedFile, with the line, for what is neither of the two formats."""
    text = read_text(name, MOST_BYTES)
    name = display_name(name)
    layers = _json(text, name) if text.lstrip()[:1] in ("{", "[") else _pipedream(text, name)
    if not layers.seconds.sum() > 0:
        raise RefusedFile(f"{name}: none of its layers takes any time")
    return layers


def _json(text: str, name: str) -> Layers:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise RefusedFile(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        raise RefusedFile(f"{name}: not JSON that can be read: {error}") from None
    lists = [value for value in values.values() if isinstance(value, list)] if isinstance(values, dict) else []
    count = len(lists[0]) if lists else 1
    if not 1 <= count <= MOST_LAYERS:
        raise RefusedFile(f"{name}: {count} layers, but a plan is for 1 to {MOST_LAYERS}")
    try:
        times, machine = read_profile(text, name, count)
    except UsageError as error:
        raise RefusedFile(str(error).replace("the schedule has", "its first list is of")) from None
    chain = tuple(itertools.pairwise(range(count)))
    return Layers(tuple(map(str, range(count))), chain, _arrays(times, count), machine)


def _arrays(times: Mapping[str, Amount], count: int) -> dict[str, Numbers]:
    return {direction: by_stage(time, count) for direction, time in times.items()}


class _Node(NamedTuple):
    name: str
    description: str
    numbers: list[float]  # as _NAMES


def _pipedream(text: str, name: str) -> Layers:
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.startswith("\t"):
                edges[_edge(line.rstrip(), nodes)] = None
            elif line.strip():
                node = _node(line.rstrip())
                if node.name in nodes:
                    raise ValueError(f"{clip(node.name)} is there twice")
                nodes[node.name] = node
            for things, most, words in ((nodes, MOST_LAYERS, "layers"), (edges, MOST_EDGES, "edges")):
                if len(things) > most:
                    raise ValueError(f"more than {most} {words}")
        except ValueError as error:
            raise RefusedFile(f"{name}:{number}: {error}") from None
    order = _sorted(nodes, edges)
    if order is None:
        raise RefusedFile(f"{name}: its edges go in a circle")
    place = {node: at for at, node in enumerate(order)}
    consumed, produced = {a for a, _ in edges}, {b for _, b in edges}
    table = np.zeros((len(order), len(_NAMES)))
    for at, node in enumerate(nodes[one] for one in order):
        an_input = node.description.startswith("Input") and node.name not in produced
        a_part = node.description.startswith("__getitem__") and node.name not in consumed
        table[at] = 0.0 if an_input or a_part else node.numbers
    forward, backward, activation, weight = table.T.copy()
    return Layers(
        tuple(order),
        tuple(sorted((place[a], place[b]) for a, b in edges)),
        {"F": forward / 1e3, "B": backward / 1e3},
        Machine(activation=activation, weight=weight, saved=0),
    )


def _node(line: str) -> _Node:
    found = _LAYER.fullmatch(line)
    if found is None:
        raise ValueError(
            f"not a layer, NAME -- DESCRIPTION -- {'=..., '.join(_NAMES)}=..., nor an edge: '{clip(line)}'"
        )
    numbers = []
    for what, text in zip(_NAMES, found.groups()[2:], strict=True):
        parts = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
        try:
            value = math.fsum(map(float, parts))
        except (ValueError, OverflowError):
            value = -1.0
        if not 0 <= value < 1e18:
            raise ValueError(f"{what} should be a number from 0 to 1e18, not '{clip(text)}'")
        numbers.append(value)
    return _Node(found[1], found[2], numbers)


def _edge(line: str, nodes: Mapping[str, _Node]) -> tuple[str, str]:
    found = _EDGE.fullmatch(line)
    if found is None:
        raise ValueError(f"not an edge, a tab and NAME -- NAME: '{clip(line.strip())}'")
    for one in found.groups():
        if one not in nodes:
            raise ValueError(f"no layer above is called '{clip(one)}'")
    return found[1], found[2]


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """node2 before node10."""
    parts = re.findall(r"([0-9]{1,18})|([^0-9]+|[0-9])", name)
    return tuple((0, int(digits), "") if digits else (1, 0, other) for digits, other in parts)


def _sorted(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[str] | None:
    """All nodes, producers before consumers and else by name; None where there is no such order."""
    consumers: dict[str, list[str]] = {node: [] for node in nodes}
    waits = dict.fromkeys(consumers, 0)
    for producer, consumer in edges:
        consumers[producer].append(consumer)
        waits[consumer] += 1
    ready = [(_natural(node), node) for node, count in waits.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for consumer in consumers[node]:
            waits[consumer] -= 1
            if not waits[consumer]:
                heapq.heappush(ready, (_natural(consumer), consumer))
    return order if len(order) == len(waits) else None
