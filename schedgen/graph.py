"""Jobs, and what each waits for (the seed's pred and succ).

A job is (s, b, d). Microbatches never wait for one another, so the graph is
kept once, over nodes (d, s); job j of node k and microbatch b is k * B + b.
For the chain it says
    pred(s, b, F) = {(s-1, b, F)}
    pred(S-1, b, B) = {(S-1, b, F)}
    pred(s, b, B) = {(s+1, b, B), (s, b, F)}
and where the backward is split, pred(s, b, W) = {(s, b, I)}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import NamedTuple

from schedgen.errors import UsageError, clip
from schedgen.program import DIRECTIONS, B, F, W


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


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, s + 1) for s in range(stages - 1))


def shards(edges: tuple[tuple[int, int], ...], tensor: int) -> tuple[tuple[int, int], ...]:
    """The edges of so many shards of every stage, each from a shard to the same shard of the consumer."""
    return tuple(sorted((p * tensor + t, c * tensor + t) for p, c in edges for t in range(tensor)))


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


def check_edges(edges: object, stages: int, tensor: int = 1) -> tuple[tuple[int, int], ...]:
    """The user's edges, sorted; an error where they are no DAG that ends in one loss.

    `tensor`: each stage has so many shards, and they edges of their own.
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
        if list(shards(found, tensor)) != pairs:
            raise UsageError("each shard of a stage must read the same shard of each producer, and no other")
        return tuple(pairs)
    ends = sorted(set(range(stages - 1)) - {producer for producer, _ in pairs})
    if ends:
        others = clip(str(ends))
        raise UsageError(
            f"the last stage, {stages - 1}, alone must end in the loss, but no stage reads the output of {others}"
        )
    return tuple(pairs)
