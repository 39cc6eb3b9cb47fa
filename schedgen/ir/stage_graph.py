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

from operator import index

from schedgen.util.errors import UsageError, clip


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, s + 1) for s in range(stages - 1))


def shards(edges: tuple[tuple[int, int], ...], tensor: int) -> tuple[tuple[int, int], ...]:
    """The edges of so many shards of every stage, each from a shard to the same shard of the consumer."""
    return tuple(sorted((p * tensor + t, c * tensor + t) for p, c in edges for t in range(tensor)))


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
