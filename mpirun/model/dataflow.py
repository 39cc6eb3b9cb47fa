"""What every stage reads and gives: values between stages, and the messages that carry them.

A stage's forward takes positional arguments, its *sources*: leaves of the
microbatch's input, which every rank makes for itself, and outputs of earlier
stages. What one consumer (or, where all read the same, each) takes of a stage
travels as one message: the tensor itself, or several packed one behind the
other. A gradient goes back as the message came, for its floating-point part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedgen.ir.graph_file import Dag
from schedgen.ir.header import Header
from schedgen.ir.instructions import Kind
from schedgen.util.errors import UsageError

ALIGN = 64  # bytes: where each tensor begins in a message of several


class Input(NamedTuple):
    """A leaf of the microbatch's input, flattened as a pytree."""

    leaf: int


class Value(NamedTuple):
    """An output of an earlier stage."""

    stage: int
    output: int


Source = Input | Value
Reads = Sequence[Sequence[Source]]  # by stage: its sources


class Like(NamedTuple):
    """A tensor's shape and type."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class Bundle:
    """Some outputs of a stage in one message."""

    def __init__(self, indices: Sequence[int], outputs: Sequence[Like]) -> None:
        """`outputs`: all of the stage; `indices`: which of them."""
        self.indices = tuple(indices)
        self.of = [outputs[index] for index in indices]
        ends = [0]
        for one in self.of:
            ends.append(ends[-1] + -(-one.bytes // ALIGN) * ALIGN)
        self.begins = ends[:-1]
        # What travels: at least a byte, where nothing in it is a number.
        self.like = self.of[0] if len(self.of) == 1 else Like((max(ends[-1], 1),), torch.uint8)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The message of these tensors, of which there is one an index."""
        if len(tensors) == 1:
            return tensors[0]
        flat = torch.empty(self.like.size, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.unpack(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Views of what is in a message."""
        if len(self.of) == 1:
            return [message]
        parts = zip(self.begins, self.of, strict=True)
        return [message[at : at + one.bytes].view(one.dtype).view(one.size) for at, one in parts]


class Wires:
    """The messages of a model whose stages have outputs like these; the same on all ranks."""

    def __init__(self, reads: Reads, header: Header, outputs: Sequence[Sequence[Like]]) -> None:
        """`outputs`: by stage."""
        self.header, self.reads, self.outputs = header, reads, outputs
        self.taken = taken(reads)

    @cached_property
    def _bundles(self) -> dict[tuple[int, int, int], Bundle]:
        """By kind, stage and consumer (-1: all); the gradient's has the floating-point outputs."""
        found: dict[tuple[int, int, int], Bundle] = {}
        for p, consumers in enumerate(self.header.graph.consumers):
            for c in consumers:
                indices = self.taken[p, c]
                numbers = [index for index in indices if self.outputs[p][index].dtype.is_floating_point]
                found[Kind.X, p, self.header.graph.output_consumer(p, c)] = Bundle(indices, self.outputs[p])
                found[Kind.G, p, self.header.graph.gradient_consumer(p, c)] = Bundle(numbers, self.outputs[p])
        return found

    def bundle(self, kind: int, stage: int, via: int) -> Bundle:
        """The message x.stage.b(.via) or g.stage.b(.via)."""
        return self._bundles[kind, stage, via]

    def x(self, producer: int, consumer: int) -> Bundle:
        return self.bundle(Kind.X, producer, self.header.graph.output_consumer(producer, consumer))

    def g(self, producer: int, consumer: int) -> Bundle:
        return self.bundle(Kind.G, producer, self.header.graph.gradient_consumer(producer, consumer))

    def arguments(self, stage: int) -> Arguments:
        """How a stage's arguments are made."""
        values = [Value(p, index) for p in self.header.graph.producers[stage] for index in self.taken[p, stage]]
        return Arguments(
            [(values.index(one) if isinstance(one, Value) else -1 - one.leaf) for one in self.reads[stage]]
        )

    def activation(self, stage: int) -> int:
        """Bytes of all x.stage.b; 0 of the last stage."""
        if not self.header.graph.consumers[stage]:
            return 0
        return sum(self.bundle(Kind.X, stage, via).like.bytes for via in self.header.graph.output_consumers(stage))


class Arguments:
    """A stage's arguments, in terms of the values it receives and of the input's leaves."""

    def __init__(self, places: Sequence[int]) -> None:
        """`places`: k for value k, -1 - i for leaf i."""
        self.places = places
        self.reads_input = any(place < 0 for place in places)

    def __call__(self, values: Sequence[Tensor], leaves: Sequence[Any]) -> list[Any]:
        return [values[place] if place >= 0 else leaves[-1 - place] for place in self.places]


def taken(reads: Reads) -> dict[tuple[int, int], tuple[int, ...]]:
    """Which outputs of a producer a consumer reads, ascending, by (producer, consumer)."""
    found: dict[tuple[int, int], set[int]] = {}
    for consumer, sources in enumerate(reads):
        for one in sources:
            if isinstance(one, Value):
                found.setdefault((one.stage, consumer), set()).add(one.output)
    return {edge: tuple(sorted(indices)) for edge, indices in sorted(found.items())}


def dag(reads: Reads, tied: Iterable[Iterable[int]] = ()) -> Dag:
    """What a schedule must know of a model; `tied`: the stages of each tie."""
    edges = taken(reads)
    parts: dict[int, list[tuple[int, ...]]] = {}
    for (producer, _), indices in edges.items():
        parts.setdefault(producer, []).append(indices)
    apart = tuple(stage for stage, lists in sorted(parts.items()) if len(set(lists)) > 1)
    ties = {tuple(sorted(set(stages))) for stages in tied}
    return Dag(len(reads), tuple(edges), apart, tuple(sorted(tie for tie in ties if len(tie) > 1)))


def text(found: Dag) -> str:
    """The file that `schedgen compile --graph` reads."""
    values = {key: value for key, value in found._asdict().items() if value != ()}
    return "{\n" + ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in values.items()) + "\n}\n"


def check(reads: Reads, header: Header) -> None:
    """UsageError where the schedule's edges are not the model's."""
    if len(reads) != header.stages:
        raise UsageError(f"the model says what {len(reads)} stages read, but there are {header.stages}")
    for stage, sources in enumerate(reads):
        for one in sources:
            if not isinstance(one, Input | Value) or not all(type(number) is int for number in one) or one[-1] < 0:
                raise UsageError(f"stage {stage} of the model reads {one!r}, which is no Input and no Value")
            if isinstance(one, Value) and not 0 <= one.stage < stage:
                raise UsageError(
                    f"stage {stage} of the model reads an output of stage {one.stage}, which is not before it"
                )
    found = dag(reads)
    if (found.edges, found.apart) != (tuple(header.graph.edges), tuple(header.graph.per_consumer)):
        raise UsageError(
            f"{_difference(found, header)}: compile it with --graph FILE, which python -m mpirun graph --model ... "
            f"--stages {header.stages // header.tensor_parallel.degree} -o FILE writes"
        )


def _difference(model: Dag, header: Header) -> str:
    for p, c in model.edges:
        if (p, c) not in header.graph.edges:
            return f"stage {c} of the model reads stage {p}, but in the schedule it does not"
    for p, c in header.graph.edges:
        if (p, c) not in model.edges:
            return f"in the schedule stage {c} reads stage {p}, but in the model it does not"
    (stage, *_) = sorted(set(model.apart) ^ set(header.graph.per_consumer))
    where = "model" if stage in model.apart else "schedule"
    return f"only in the {where} what stage {stage} gives is different for those that read it"
