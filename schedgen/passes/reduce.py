"""Reduction: every owner of a stage gets the sum of its weight gradients, in a fixed order.

A worker that does not own the stage sends dw.s on once, when its last backward
of the stage is done and the sums it passes on have come in. Workers that send
to one owner form a tree with at most `fan_out` branches at each, those that
are done first furthest from the owner. Who receives adds in order of arrival,
one message behind the receives and the last one behind its next job, so that
a transfer overlaps other work. Several owners then sum up among themselves:
one ALLREDUCE, as soon as the last of them has its part.

Of divided weights every part has an owner, and a tree, of its own; K parts count as one sum, and a worker sends
first to its nearest neighbours upwards.
"""

from __future__ import annotations

import numpy as np

from schedgen.passes.lookup import behind, home, next_compute
from schedgen.passes.options import Options
from schedgen.program import Kind, Op, Program, rows

Field = tuple[int, int, int, int, int, int]  # op, rank, stage, via, peer, after


def reduce(program: Program, options: Options) -> Program:
    header, table = program.header, program.rows
    groups = {group: index for index, group in enumerate(header.groups)}
    done = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_W)))
    final = np.full((header.stages, header.workers), -1, np.int64)  # last backward of a stage on a worker
    np.maximum.at(final, (table.stage[done], table.rank[done]), done)
    last = np.where(final < 0, -1, behind(program, final))
    fields: list[Field] = []
    for stage, owners in enumerate(header.owners):
        ends = {rank: int(last[stage, rank]) for rank in range(header.workers)}
        if header.parts(stage) != (-1,):
            fields += _parts(program, stage, ends, options.fan_out)
            continue
        senders: dict[int, list[int]] = {owner: [] for owner in owners}
        for rank in np.flatnonzero(last[stage] >= 0).tolist():
            if rank not in senders:
                senders[home(program, rank, stage)].append(rank)
        complete = max(
            _gather(program, fields, stage, -1, owner, ranks, ends, options.fan_out) for owner, ranks in senders.items()
        )
        if len(owners) > 1:
            fields += [(Op.ALLREDUCE, owner, stage, -1, groups[owners], complete) for owner in owners]
    op, rank_, stage_, via_, peer, after = np.array(fields, np.int64).reshape(-1, 6).T
    return program.insert(rows(op, rank_, kind=Kind.DW, stage=stage_, via=via_, peer=peer), after=after)


def _parts(program: Program, stage: int, ends: dict[int, int], fan_out: int) -> list[Field]:
    """The sums of all parts of a stage; what one part has behind one row stays together."""
    found: list[tuple[int, int, Field]] = []  # behind which row, how far its first sender is from the owner
    owners = program.header.shards[stage]
    for via, owner in enumerate(owners):
        mine: list[Field] = []
        ranks = [rank for rank, end in ends.items() if end >= 0 and rank != owner]
        _gather(program, mine, stage, via, owner, ranks, ends, fan_out * len(owners))
        far: dict[int, int] = {}
        for op, rank, _, _, peer, after in mine:
            if op == Op.SEND:
                far.setdefault(after, (peer - rank) % program.header.workers)
        found += [(field[-1], far.get(field[-1], 0), field) for field in mine]
    return [field for *_, field in sorted(found, key=lambda one: one[:2])]


def _gather(
    program: Program, fields: list[Field], stage: int, via: int, owner: int, ranks: list[int], ends: dict[int, int],
    fan_out: int,
) -> int:  # fmt: skip
    """Sums of `ranks` to `owner` through a tree; the row behind which the owner has them all.

    ends[rank]: the row behind which the rank's own part is there.
    """
    # A heap: the branches of place i are fan_out * i + 1 and those behind it.
    tree = [owner, *sorted(ranks, key=lambda rank: (-ends[rank], rank))]
    ready = [ends[rank] for rank in tree]  # behind which row each sum is complete
    for i in range(len(tree) - 1, -1, -1):
        branches = range(fan_out * i + 1, min(fan_out * i + fan_out, len(tree) - 1) + 1)
        arrivals = sorted((ready[j], tree[j]) for j in branches)
        waiting = -1  # the sender whose sum is not added yet
        for at, sender in arrivals:
            fields += [(Op.SEND, sender, stage, via, tree[i], at), (Op.RECV, tree[i], stage, via, sender, at)]
            if waiting >= 0:
                fields.append((Op.ADD, tree[i], stage, via, waiting, at))
            waiting = sender
        if arrivals:
            at = max(arrivals[-1][0], ready[i])
            if i == 0:  # the owner has time; who passes a sum on has not
                at = int(next_compute(program, np.array([at]), np.array([tree[i]]))[0])
            fields.append((Op.ADD, tree[i], stage, via, waiting, at))
            ready[i] = at
    return ready[0]
