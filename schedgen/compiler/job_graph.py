"""Jobs, and what each waits for: pred and succ of Rahimi 2025."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from schedgen.ir.instructions import DIRECTIONS, B, F, W


class Graph(NamedTuple):
    directions: int
    stages: int
    microbatches: int
    pred: tuple[tuple[int, ...], ...]  # nodes each node waits for
    succ: tuple[tuple[int, ...], ...]

    def node(self, d: int, s: int) -> int:
        return d * self.stages + s

    def words(self, job: int) -> str:
        """A job the way users write it: F(s, b)."""
        node, b = divmod(job, self.microbatches)
        d, s = divmod(node, self.stages)
        return f"{DIRECTIONS[self.directions][d]}({s}, {b})"


def graph(
    stages: int,
    microbatches: int,
    directions: int,
    edges: tuple[tuple[int, int], ...],
    sums: Callable[[int], Iterable[int]] = lambda stage: (stage,),
) -> Graph:
    """`sums(s)`: the stages whose outputs, and gradients of their inputs, are added up to those of stage s."""
    pred: list[set[int]] = [set() for _ in range(directions * stages)]
    for producer, consumer in edges:
        pred[F * stages + consumer].update(F * stages + one for one in sums(producer))
        pred[B * stages + producer].update(B * stages + one for one in sums(consumer))
    for s in range(stages):
        pred[B * stages + s].add(F * stages + s)
        if directions == 3:
            pred[W * stages + s].add(B * stages + s)
    succ: list[list[int]] = [[] for _ in pred]
    for node, before in enumerate(pred):
        for other in before:
            succ[other].append(node)
    return Graph(directions, stages, microbatches, tuple(tuple(sorted(p)) for p in pred), tuple(map(tuple, succ)))
