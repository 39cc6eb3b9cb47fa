"""The values that travel between stages, and the messages that carry them.

A stage's forward takes positional arguments, its *sources*: leaves of the microbatch's input, which every rank makes
for itself, and outputs of earlier stages. The outputs that a consumer reads travel as one message, a `Bundle`: the
tensor itself, or several tensors packed one after the other. If all consumers read the same outputs, they all get the
same message. A gradient travels back in the same form, without the outputs that are not floating-point.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedgen.ir.graph_file import ModelGraph
from schedgen.ir.header import Header
from schedgen.ir.instructions import Kind
from schedgen.ir.stage_graph import check_edges
from schedgen.util.errors import UsageError

# Bytes: the alignment of each tensor in a message of several, and of each parameter in a stage's flat weights. For
# memory that does not begin at a multiple of 256, cuBLAS may choose another kernel, which gives other bits.
ALIGN = 256


class Input(NamedTuple):
    """A leaf of the microbatch's input, flattened as a pytree."""

    leaf: int


class Value(NamedTuple):
    """An output of an earlier stage."""

    stage: int
    output: int


Source = Input | Value
Reads = Sequence[Sequence[Source]]  # by stage: its sources


class TensorSpec(NamedTuple):
    """A tensor's shape and type, as it travels.

    order  its dimensions as they lie in memory, if that is in another order, as in channels_last: it is sent permuted
           in this way, and permuted back where it is read, so that it has the strides that it would have uncut
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before it is sent, and where it is read."""
        return tuple(self.size[self.order.index(dim)] for dim in range(len(self.order))) if self.order else self.size

    def sent(self, x: Tensor) -> Tensor:
        """The tensor as it is sent: contiguous, its numbers in memory as they are (torch may negate them lazily)."""
        return (x.permute(self.order) if self.order else x).contiguous().resolve_neg()

    def read(self, x: Tensor) -> Tensor:
        """A tensor that was sent, as it is read: a view of it."""
        return x.permute([self.order.index(dim) for dim in range(len(self.order))]) if self.order else x

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.size) * self.dtype.itemsize

    def zeros(self, device: torch.device) -> Tensor:
        """Such a tensor, filled with zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=device)


def spec_of(x: Tensor) -> TensorSpec:
    """How a tensor travels: in the order that its dimensions have in memory."""
    strides = torch.empty_like(x, device="meta").stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], x.shape[dim] == 1))
    permuted = order != sorted(order)
    return TensorSpec(tuple(x.shape[dim] for dim in order), x.dtype, tuple(order) if permuted else ())


class Bundle:
    """Some outputs of a stage in one message, whose shape and type is `spec`."""

    def __init__(self, indices: Sequence[int], outputs: Sequence[TensorSpec]) -> None:
        """`outputs`: all of the stage; `indices`: those in the message, in this order."""
        self.indices = tuple(indices)
        self.specs = [outputs[index] for index in indices]
        ends = [0]
        for spec in self.specs:
            ends.append(ends[-1] + -(-spec.bytes // ALIGN) * ALIGN)
        self.offsets = ends[:-1]  # bytes
        # A message has a byte at least, even where no output is in it.
        self.spec = self.specs[0] if len(self.specs) == 1 else TensorSpec((max(ends[-1], 1),), torch.uint8)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The message of these tensors, one for each index."""
        if len(tensors) == 1:
            return tensors[0]
        message = torch.empty(self.spec.size, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.unpack(message), tensors, strict=True):
            view.copy_(tensor)
        return message

    def unpack(self, message: Tensor) -> list[Tensor]:
        """The tensors in a message, as views of it."""
        if len(self.specs) == 1:
            return [message]
        parts = zip(self.offsets, self.specs, strict=True)
        return [message[at : at + spec.bytes].view(spec.dtype).view(spec.size) for at, spec in parts]


class Dataflow:
    """The messages between stages, for microbatches of one size; the same on all ranks."""

    def __init__(self, reads: Reads, header: Header, outputs: Sequence[Sequence[TensorSpec]]) -> None:
        """`outputs`: by stage."""
        self.graph, self.reads, self.outputs = header.graph, reads, outputs
        self.outputs_read = outputs_read(reads)

    @cached_property
    def _bundles(self) -> dict[tuple[int, int, int], Bundle]:
        """By kind, stage and consumer (-1: all); messages of gradients have the floating-point outputs only."""
        bundles: dict[tuple[int, int, int], Bundle] = {}
        for p, consumers in enumerate(self.graph.consumers):
            for c in consumers:
                indices = self.outputs_read[p, c]
                graded = [index for index in indices if self.outputs[p][index].dtype.is_floating_point]
                bundles[Kind.X, p, self.graph.output_consumer(p, c)] = Bundle(indices, self.outputs[p])
                bundles[Kind.G, p, self.graph.gradient_consumer(p, c)] = Bundle(graded, self.outputs[p])
        return bundles

    def bundle(self, kind: int, stage: int, consumer: int) -> Bundle:
        """The message x.stage.b(.consumer) or g.stage.b(.consumer)."""
        return self._bundles[kind, stage, consumer]

    def x(self, producer: int, consumer: int) -> Bundle:
        """The message in which a consumer gets the producer's outputs."""
        return self.bundle(Kind.X, producer, self.graph.output_consumer(producer, consumer))

    def g(self, producer: int, consumer: int) -> Bundle:
        """The message in which a producer gets the consumer's share of its outputs' gradients."""
        return self.bundle(Kind.G, producer, self.graph.gradient_consumer(producer, consumer))

    def arguments(self, stage: int) -> Arguments:
        """How the arguments of a stage's forward are made of the values that it receives, in the producers' order."""
        values = [Value(p, index) for p in self.graph.producers[stage] for index in self.outputs_read[p, stage]]
        count = len(values)
        sources, specs = self.reads[stage], [self.outputs[value.stage][value.output] for value in values]
        positions = [values.index(x) if isinstance(x, Value) else count + x.leaf for x in sources]
        return Arguments(positions, count, specs if any(spec.order for spec in specs) else ())


class Arguments:
    """The arguments of a stage's forward, in terms of the values it receives and of the input's leaves."""

    def __init__(self, positions: Sequence[int], values: int, specs: Sequence[TensorSpec] = ()) -> None:
        """`positions`: by argument, its index in the list of `values` received values followed by the leaves.

        `specs`: of the values; empty: they are read as they were sent.
        """
        self.positions, self.specs = positions, specs
        self.reads_input = any(position >= values for position in positions)
        # How many arguments there are, if they are the first values in order; else 0.
        self.first = len(positions) if list(positions) == list(range(len(positions))) else 0

    def __call__(self, values: Sequence[Tensor], leaves: Sequence[Any]) -> list[Any]:
        """The arguments, in their order."""
        if self.specs:
            values = [spec.read(x) for spec, x in zip(self.specs, values, strict=True)]
        both = [*values, *leaves]
        return both[: self.first] if self.first else [both[position] for position in self.positions]


def all_outputs(sources: Sequence[Source], counts: Sequence[int]) -> list[Source]:
    """`sources` with all outputs of a stage in place of its first; `counts`: how many each earlier stage has."""
    return [
        each
        for source in sources
        for each in (
            [Value(source.stage, k) for k in range(counts[source.stage])] if isinstance(source, Value) else [source]
        )
    ]


def outputs_read(reads: Reads) -> dict[tuple[int, int], tuple[int, ...]]:
    """The producer's outputs that the consumer reads, ascending, by (producer, consumer)."""
    outputs: dict[tuple[int, int], set[int]] = {}
    for consumer, sources in enumerate(reads):
        for source in sources:
            if isinstance(source, Value):
                outputs.setdefault((source.stage, consumer), set()).add(source.output)
    return {edge: tuple(sorted(indices)) for edge, indices in sorted(outputs.items())}


def model_graph(
    reads: Reads, tied: Iterable[Iterable[tuple[int, str]]] = (), sliced: Collection[int] = ()
) -> ModelGraph:
    """What a schedule must know of a model; `reads`, `tied` and `sliced` as `Model`'s."""
    edges = outputs_read(reads)
    by_producer: dict[int, set[tuple[int, ...]]] = {}
    for (producer, _), indices in edges.items():
        by_producer.setdefault(producer, set()).add(indices)
    per_consumer = tuple(stage for stage, read in sorted(by_producer.items()) if len(read) > 1)
    ties = {tuple(sorted({stage for stage, _ in tie})) for tie in tied}
    return ModelGraph(
        stages=len(reads),
        edges=tuple(edges),
        per_consumer=per_consumer,
        tied=tuple(sorted(tie for tie in ties if len(tie) > 1)),
        replicated=tuple(stage for stage in range(len(reads)) if sliced and stage not in sliced),
    )


def how_to_compile(header: Header) -> str:
    """What to do about a schedule that was compiled for another model."""
    layers = header.scheme.get("layers")
    made, stages = ("compile or plan", sum(layers)) if layers else ("compile", header.model_stages)
    return f"{made} it with --graph FILE, which python -m mpirun graph --model ... --stages {stages} -o FILE writes"


def check_reads(reads: Reads, stages: int) -> None:
    """UsageError if `reads` is malformed, or no stage reads a stage before the last."""
    if len(reads) != stages:
        raise UsageError(f"the model says what {len(reads)} stages read, but there are {stages}")
    for stage, sources in enumerate(reads):
        for source in sources:
            if not isinstance(source, Input | Value) or any(type(n) is not int for n in source) or source[-1] < 0:
                raise UsageError(f"stage {stage} of the model reads {source!r}, which is no Input and no Value")
            if isinstance(source, Value) and not 0 <= source.stage < stage:
                raise UsageError(
                    f"stage {stage} of the model reads an output of stage {source.stage}, which is not before it"
                )
    check_edges(outputs_read(reads), stages)


def check_graph(reads: Reads, header: Header) -> None:
    """UsageError if the schedule's edges are not the model's."""
    difference = _difference(model_graph(reads), header)
    if difference is not None:
        raise UsageError(f"{difference}: {how_to_compile(header)}")


def _difference(model: ModelGraph, header: Header) -> str | None:
    of_model, of_schedule = set(model.edges or ()), set(header.graph.edges)
    for p, c in sorted(of_model - of_schedule):
        return f"stage {c} of the model reads stage {p}, but in the schedule it does not"
    for p, c in sorted(of_schedule - of_model):
        return f"in the schedule stage {c} reads stage {p}, but in the model it does not"
    for stage in sorted(set(model.per_consumer) - set(header.graph.per_consumer)):
        return (
            f"stage {stage} of the model gives each of its readers another output, but in the schedule all get the same"
        )
    return None  # a schedule may send a message to each consumer where one for all would do
