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

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import behind, home, next_compute
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program, rows


class Fields:
    """Instructions to be inserted, as columns of lists."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []  # op, rank, stage, via, peer
        self.after: list[int] = []
        self.order: list[tuple[int, int]] = []  # of what stands behind one row, where weights are divided
        self.last: list[int] = []  # the last ADDs of owners, which stand behind a job still to be found

    def add(self, op: Op, rank: int, stage: int, via: int, peer: int, after: int, order: tuple[int, int]) -> None:
        self.rows.append((op, rank, stage, via, peer))
        self.after.append(after)
        self.order.append(order)


def reduce(program: Program, options: Options) -> Program:
    header, table = program.header, program.rows
    groups = {group: index for index, group in enumerate(header.groups)}
    done = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_W)))
    final = np.full((header.stages, header.workers), -1, np.int64)  # last backward of a stage on a worker
    np.maximum.at(final, (table.stage[done], table.rank[done]), done)
    ends = np.where(final < 0, -1, behind(program, final))
    fields = Fields()
    sums: list[tuple[int, int, slice]] = []  # ALLREDUCEs, the row behind which owners' own are there, and last ADDs
    for stage, owners in enumerate(header.owners):
        begin, parts = len(fields.last), header.weight_shards.parts(stage)
        computing = np.flatnonzero(ends[stage] >= 0).tolist()
        for via in parts:
            senders: dict[int, list[int]] = {owner: [] for owner in header.weight_shards.holders(stage, via)}
            for rank in computing:
                if rank not in senders:
                    senders[home(program, rank, stage) if via < 0 else header.part_owners[stage][via]].append(rank)
            for owner, ranks in senders.items():
                fan_out = options.fan_out * len(parts)
                _gather(fields, stage, via, owner, ranks, ends[stage].tolist(), fan_out)
        if header.several_owners[stage]:
            for owner in owners:
                sums.append((len(fields.after), int(ends[stage, list(owners)].max()), slice(begin, len(fields.last))))
                fields.add(Op.ALLREDUCE, owner, stage, -1, groups[owners], -1, (0, 0))
    op, rank_, stage_, via_, peer = np.array(fields.rows, np.int64).reshape(-1, 5).T
    after = np.array(fields.after, np.int64)
    last = np.array(fields.last, np.int64)
    after[last] = next_compute(
        program, after[last], rank_[last].astype(np.int32)
    )  # an owner has time; who passes a sum on has not
    for index, own, adds in sums:
        after[index] = max(own, after[last[adds]].max(initial=-1))
    new = rows(op, rank_, kind=Kind.DW, stage=stage_, via=via_, peer=peer)
    if header.part_owners:
        far, depth = np.array(fields.order, np.int64).reshape(-1, 2).T[::-1]
        order = np.lexsort((far, depth, after))
        new, after = new.take(order), after[order]
    return program.insert(new, after=after)


def _gather(fields: Fields, stage: int, via: int, owner: int, ranks: list[int], ends: list[int], fan_out: int) -> None:
    """Sums of `ranks` to `owner` through a tree; ends[rank]: the row behind which the rank's own part is there.

    Behind one row senders far from the owner come first, so that sums are complete when they are passed on, and
    among those at one distance the nearest neighbours.
    """
    # A heap: the branches of place i are fan_out * i + 1 and those behind it.
    tree = [owner, *sorted(ranks, key=lambda rank: (-ends[rank], rank))]
    ready = [ends[rank] for rank in tree]  # behind which row each sum is complete
    height = [0] * len(tree)
    for i in range(1, len(tree)):
        height[i] = height[(i - 1) // fan_out] - 1
    for i in range(len(tree) - 1, -1, -1):
        to, branches = tree[i], range(fan_out * i + 1, min(fan_out * i + fan_out, len(tree) - 1) + 1)
        far = {tree[j]: (to - tree[j]) % len(ends) for j in branches} if via >= 0 else {}
        arrivals = sorted((ready[j], far.get(tree[j], 0), tree[j]) for j in branches)
        waiting = -1  # the sender whose sum is not added yet
        for at, near, sender in arrivals:
            fields.add(Op.SEND, sender, stage, via, to, at, (height[i], near))
            fields.add(Op.RECV, to, stage, via, sender, at, (height[i], near))
            if waiting >= 0:
                fields.add(Op.ADD, to, stage, via, waiting, at, (height[i], near))
            waiting = sender
        if arrivals:
            ready[i] = max(arrivals[-1][0], ready[i])
            if i == 0:
                fields.last.append(len(fields.after))
            fields.add(Op.ADD, to, stage, via, waiting, ready[i], (height[i], len(ends)))
