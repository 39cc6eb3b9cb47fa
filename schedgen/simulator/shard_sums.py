"""Sums over shards: how many a schedule has, the bytes that they move, and the parts that ranks add up in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Numbers
from schedgen.ir.program import Program


@dataclass(frozen=True, eq=False)
class ShardSums:
    """The sums that add up what the shards of split stages give."""

    rows: Numbers  # of the ALLREDUCEs: a sum has one on the rank of each of its shards
    shards: int  # T

    @property
    def count(self) -> int:
        """How many sums there are."""
        return len(self.rows) // self.shards

    def bytes_moved(self, summed: Numbers) -> int:
        """The bytes that rings move for them; `summed`: by row of the program, the bytes that it sums."""
        return int(2 * (self.shards - 1) * summed[self.rows].sum() // self.shards)


def shard_sums(program: Program) -> ShardSums | None:
    """Those of a program; None where stages have no shards."""
    tensor = program.header.tensor_parallel
    return ShardSums(program.exchanges(), tensor.degree) if tensor else None


def summed_parts(header: Header, outputs: Numbers) -> set[tuple[int, tuple[int, ...], int]]:
    """(rank, ranks of the shards it adds up with in the shards' order, bytes of its part) of every sum.

    Equal entries share one scratch buffer. `outputs`: bytes of x and g, by stage and then by edge.
    """
    entries: set[tuple[int, tuple[int, ...], int]] = set()
    producer, consumer = np.array(header.graph.edges, np.int64).reshape(-1, 2).T
    names = np.array([header.graph.gradient_consumer(*edge) for edge in header.graph.edges], np.int64)
    gradients: dict[int, list[int]] = {}  # by stage: bytes of those that its backward gives
    by_edge = outputs[header.graph.size_columns(producer, names)]
    for stage, size in zip(consumer.tolist(), by_edge.tolist(), strict=True):
        gradients.setdefault(stage, []).append(size)
    for stage in np.flatnonzero(header.tensor_parallel.split).tolist():
        shards = header.tensor_parallel.siblings(stage)
        given = (F, [int(outputs[stage])]), (B, gradients.get(stage, []))
        for d, parts in given[: len(header.compute)]:
            for ranks in set(map(tuple, header.compute[d, shards.start : shards.stop].T.tolist())):
                entries |= {(ranks[shards.index(stage)], ranks, size) for size in parts}
    return entries
