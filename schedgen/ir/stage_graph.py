"""The stage graph: which stage reads the output of which other stage. The default is a chain.

The consumers of a stage may all read the same output, or each an output of its own (*per consumer*). Either way each
gives the producer a gradient of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np

from schedgen.util.arrays import AnyInts, Flags, Numbers
from schedgen.util.errors import UsageError, clip


@dataclass(frozen=True)
class StageGraph:
    """The edges between stages, and which stages have an output per consumer."""

    stages: int
    edges: tuple[tuple[int, int], ...]  # (producer, consumer), ascending
    per_consumer: tuple[int, ...] = ()  # stages that give each of several consumers an output of its own

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose output each stage reads; empty: it reads the input batch."""
        return self._ends(at=1, give=0)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The stages that read each stage's output; empty: the last stage or a slice of it."""
        return self._ends(at=0, give=1)

    def _ends(self, at: int, give: int) -> tuple[tuple[int, ...], ...]:
        ends: list[list[int]] = [[] for _ in range(self.stages)]
        for edge in self.edges:
            ends[edge[at]].append(edge[give])
        return tuple(tuple(sorted(stages)) for stages in ends)

    @cached_property
    def is_per_consumer(self) -> Flags:
        """By stage: whether it gives each consumer an output of its own."""
        return np.isin(np.arange(self.stages), self.per_consumer)

    def gradient_consumer(self, producer: int, consumer: int) -> int:
        """The `consumer` operand of the g that `consumer` sends to `producer`: -1 if it is the only consumer."""
        return consumer if len(self.consumers[producer]) > 1 else -1

    def output_consumer(self, producer: int, consumer: int) -> int:
        """The `consumer` operand of the x that `consumer` reads of `producer`: -1 if all consumers read one x."""
        return consumer if self.is_per_consumer[producer] else -1

    def output_consumers(self, stage: int) -> tuple[int, ...]:
        """The `consumer` operand of every x that a stage gives."""
        return self.consumers[stage] if self.is_per_consumer[stage] else (-1,)

    def size_columns(self, stage: AnyInts, consumer: AnyInts) -> Numbers:
        """The index of each x or g in an array by stage and then by edge; `consumer` as in its name."""
        edges = np.array(self.edges, np.int64).reshape(-1, 2) @ [self.stages, 1]  # ascending
        columns = self.stages + np.searchsorted(edges, stage.astype(np.int64) * self.stages + consumer)
        return np.where(consumer < 0, stage, columns)


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of a chain: each stage reads the one before it."""
    return tuple((s, s + 1) for s in range(stages - 1))


def expand_slices(edges: tuple[tuple[int, int], ...], tensor: int) -> tuple[tuple[int, int], ...]:
    """The edges if every stage has `tensor` slices: each goes from a slice to the same slice of the consumer."""
    return tuple(sorted((p * tensor + t, c * tensor + t) for p, c in edges for t in range(tensor)))


def check_edges(edges: object, stages: int, tensor: int = 1) -> tuple[tuple[int, int], ...]:
    """The user's edges, sorted; UsageError unless they are a DAG whose one end is the last stage.

    `tensor`: how many slices each stage has; the slices have edges of their own.
    """
    try:
        pairs = sorted({(index(p), index(c)) for p, c in edges})  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UsageError("edges must be pairs (producer stage, consumer stage)") from None
    for producer, consumer in pairs:
        if not 0 <= producer < consumer < stages:
            raise UsageError(
                f"edge ({producer}, {consumer}) does not go from a smaller to a larger stage within 0..{stages - 1}"
            )
    if tensor > 1:
        found = check_edges([(p // tensor, c // tensor) for p, c in pairs], stages // tensor)
        if list(expand_slices(found, tensor)) != pairs:
            raise UsageError("each slice of a stage must read the same slice of each producer, and no other")
        return tuple(pairs)
    for stage in sorted(set(range(stages - 1)) - {producer for producer, _ in pairs})[:1]:
        loss = f"the loss reads the last, {stages - 1}, alone"
        raise UsageError(f"no stage reads stage {stage}, and {loss}: join it with stage {stage + 1}")
    return tuple(pairs)


def check_per_consumer(stages: Sequence[object], edges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The stages, ascending, each once; UsageError if one has fewer than two consumers."""
    consumers = Counter(producer for producer, _ in edges)
    checked = set[int]()
    for stage in stages:
        number = None
        with suppress(TypeError):  # not a whole number
            number = index(stage)  # type: ignore[arg-type]
        if number is None or consumers[number] < 2:
            raise UsageError(f"per_consumer: the output of stage {clip(repr(stage))} is not read by several stages")
        checked.add(number)
    return tuple(sorted(checked))
