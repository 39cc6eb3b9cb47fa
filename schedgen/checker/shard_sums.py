"""Rule 10: every output and gradient of a split stage is summed over its shards once, before it is used.

What a shard gives is a part: x.s.b of its FWD, g.p.b of its BWD or BWD_I for every producer p. On the rank of that job
stands one ALLREDUCE of it, of the ranks of all shards, before any SEND of it or job that reads it. Rule 2 then says
that it stands behind the job, and rule 6 that all ranks enter it together.
"""

from __future__ import annotations

import numpy as np

from schedgen.checker.proof import Proof
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.instructions import EXCHANGED, B, F, Kind, Numbers, Op, buffer_name


def rule_10(proof: Proof) -> None:
    """Refuse a part of a sum that is not summed, not by all shards, or used before."""
    header = proof.header
    if not header.tensor_parallel:
        sums = proof.rows_of(Op.ALLREDUCE)
        for row in sums[np.isin(proof.kind[sums], EXCHANGED)][:1]:
            proof.refuse(10, int(row), "stages have no shards here")
        return
    split = header.tensor_parallel.split
    _summed(proof, Buffer.X, F, np.flatnonzero(split), np.full(split.sum(), -1), np.flatnonzero(split))
    if header.is_forward:
        return
    edges = [
        (producer, header.graph.gradient_consumer(producer, consumer), consumer)
        for producer, consumer in header.graph.edges
        if split[consumer]
    ]
    _summed(proof, Buffer.G, B, *np.array(edges, np.int64).reshape(-1, 3).T)


def _summed(proof: Proof, buffer: Buffer, d: int, stage: Numbers, consumer: Numbers, giver: Numbers) -> None:
    """Rule 10 for the parts x.stage.*.consumer, or g, that jobs of direction d of the stage `giver` give."""
    header, T = proof.header, proof.header.tensor_parallel.degree
    # By stage and then edge, as x and g are numbered; the last is for names of no buffer.
    part_of = np.full(header.stages + len(header.graph.edges) + 1, -1, np.int64)
    part_of[header.graph.size_columns(stage, consumer)] = np.arange(len(stage))
    rank = header.compute[d][giver]  # of every part and microbatch
    sums = proof.touches(buffer, Effect.CHANGE)
    part, mb = part_of[sums.number // header.microbatches], sums.number % header.microbatches
    for row in sums.rows[part < 0][:1]:
        proof.refuse(10, int(row), "the job that gives this is not split: it is no part of a sum")
    for row in sums.rows[rank[part, mb] != sums.rank][:1]:
        proof.refuse(10, int(row), "this rank does not give it")
    shards = np.sort(header.compute[d].reshape(-1, T, header.microbatches), axis=1)  # their ranks
    groups = np.array([group if len(group) == T else (-1,) * T for group in header.groups], np.int64).reshape(-1, T)
    right = (groups[proof.peer[sums.rows]] == shards[giver[part] // T, :, mb]).all(axis=1)
    for row in sums.rows[~right][:1]:
        proof.refuse(10, int(row), "this is not the group of the stage's shards")
    summed = np.full(rank.shape, -1, np.int64)  # by part and microbatch: the row
    summed[part, mb] = sums.rows
    last = summed[part, mb]
    for row in last[last != sums.rows][:1]:
        proof.refuse(10, int(row), "this is summed twice")

    def name(k: int, b: int) -> str:
        return buffer_name(Kind.X if buffer == Buffer.X else Kind.G, int(stage[k]), b, int(consumer[k]))

    for k, b in np.argwhere(summed < 0)[:1].tolist():
        proof.refuse_rank(10, int(rank[k, b]), f"ALLREDUCE of {name(k, b)} is missing")
    uses = proof.touches(buffer, Effect.READ, Effect.SEND)
    uses = uses.by(part_of[uses.number // header.microbatches] >= 0)
    part, mb = part_of[uses.number // header.microbatches], uses.number % header.microbatches
    here = rank[part, mb] == uses.rank
    first = np.full(rank.shape, len(proof.program), np.int64)
    np.minimum.at(first, (part[here], mb[here]), uses.rows[here])
    for k, b in np.argwhere(first < summed)[:1].tolist():
        proof.refuse(10, int(first[k, b]), f"{name(k, b)} is only a shard's part here")
