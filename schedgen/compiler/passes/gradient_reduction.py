"""Reduction: every owner of a stage gets the sum of its weight gradients, in a fixed order.

A worker that does not own the stage sends dw.s once, after its last backward of the stage and after it has received
the sums that it relays. The workers that send to one owner form a tree with at most `fan_out` branches at each node;
workers that finish first are furthest from the owner. A receiver adds sums in order of arrival, each after the next
receive; an owner adds the last one after its next job, so that the transfer overlaps other work. Several owners then
all-reduce their sums once, as soon as the last owner's sum is complete, unless `owner_sums` sums them by messages.

Each shard of weights has an owner, and a tree, of its own. K shards count as one sum, and a worker sends first to the
next worker, then to the one after it, and so on, modulo the number of workers.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import next_compute, rows_at_end, serving_owners
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program, concatenate, rows

# An instruction to be inserted: op, rank, stage, shard, its last operand, the row after which it is inserted, and for
# divided weights its order among the instructions inserted there: by depth and then by distance.
Fields = tuple[Op, int, int, int, int, int, int, int]


def gradient_reduction(program: Program, placed: PlacedScheme) -> Program:
    """The program with the SENDs, RECVs, ADDs and ALLREDUCEs of all weight gradients."""
    header, table, units = program.header, program.rows, program.header.gradient_units
    backwards = program.rows_of(Op.BWD, Op.BWD_W)
    final = np.full((header.stages, header.workers), -1, np.int64)  # last backward of a stage on a worker
    final[table.stage[backwards], table.rank[backwards]] = backwards  # rows ascend: the last one stays
    ends = np.where(final < 0, -1, rows_at_end(program, final, placed.lengths))
    new, serving = list[Fields](), serving_owners(program)
    last_adds: list[int] = []  # owners' last ADDs, still to be moved behind the owner's next job
    sums: list[tuple[int, int, slice]] = []  # by ALLREDUCE: index, row that completes owners' own sums, last ADDs
    for stage, owners in enumerate(header.owners):
        first_add, own_shards, own_ends = len(last_adds), header.gradient_units.of(stage), ends[stage].tolist()
        fan_out = placed.options.fan_out * len(header.weight_shards.of(stage))
        computing = np.flatnonzero(ends[stage] >= 0).tolist()
        for shard in own_shards:
            senders: dict[int, list[int]] = {owner: [] for owner in units.holders(stage, shard)}
            for rank in computing:
                if rank not in senders:
                    is_divided = header.is_sharded(stage)
                    owner = header.shard_owners[stage][shard] if is_divided else serving[stage][rank]
                    senders[owner].append(rank)
            for owner, ranks in senders.items():
                if ranks:
                    _gather(new, stage, shard, owner, ranks, own_ends, fan_out)
                    last_adds.append(len(new) - 1)
        if header.several_owners[stage] and not header.sums_by_messages:
            own, adds = int(ends[stage, list(owners)].max()), slice(first_add, len(last_adds))
            for owner in owners:
                sums.append((len(new), own, adds))
                new.append((Op.ALLREDUCE, owner, stage, -1, header.group_numbers[owners], -1, 0, 0))
    op, rank_, stage_, shard_, operand, after, depth, distance = np.array(new, np.int64).reshape(-1, 8).T
    last = np.array(last_adds, np.int64)
    # An owner runs its next job before its last ADD; a worker that relays its sum does not.
    after[last] = next_compute(program, after[last], rank_[last].astype(np.int32))
    for index, own, adds in sums:
        after[index] = max(own, after[last[adds]].max(initial=-1))
    inserted = rows(op, rank_, kind=Kind.DW, stage=stage_, shard=shard_, operand=operand)
    if header.shard_owners:
        order = np.lexsort((distance, depth, after))
        inserted, after = inserted.take(order), after[order]
    return program.insert(inserted, after=after)


def _gather(
    new: list[Fields], stage: int, shard: int, owner: int, ranks: list[int], ends: list[int], fan_out: int
) -> None:
    """Append the instructions that sum the gradients of `ranks` at `owner` through a tree, the owner's last ADD last.

    ends[rank]: the row after which the rank's own gradient is complete.

    After one row, senders far from the owner come first, so that sums are complete when they are relayed, and
    among senders at one distance the nearest neighbours.
    """
    # As in a heap, the branches of node i are fan_out * i + 1 and the following ones.
    tree = [owner, *sorted(ranks, key=lambda rank: (-ends[rank], rank))]
    ready = [ends[rank] for rank in tree]  # the row after which each sum is complete
    depth = [0] * len(tree)  # negative: the deeper, the earlier
    for i in range(1, len(tree)):
        depth[i] = depth[(i - 1) // fan_out] - 1
    for i in range(len(tree) - 1, -1, -1):
        to, branches = tree[i], range(fan_out * i + 1, min(fan_out * i + fan_out, len(tree) - 1) + 1)
        distance = {tree[j]: (to - tree[j]) % len(ends) if shard >= 0 else 0 for j in branches}
        arrivals = sorted((ready[j], distance[tree[j]], tree[j]) for j in branches)
        waiting = -1  # the sender whose sum is not added yet
        for row, near, sender in arrivals:
            new.append((Op.SEND, sender, stage, shard, to, row, depth[i], near))
            new.append((Op.RECV, to, stage, shard, sender, row, depth[i], near))
            if waiting >= 0:
                new.append((Op.ADD, to, stage, shard, waiting, row, depth[i], near))
            waiting = sender
        if arrivals:
            ready[i] = max(arrivals[-1][0], ready[i])
            new.append((Op.ADD, to, stage, shard, waiting, ready[i], depth[i], len(ends)))


def tied_gradients(program: Program, placed: PlacedScheme) -> Program:
    """The program with the ALLREDUCEs of all ties, after `gradient_reduction`.

    Stages that share parameters get the sum of their gradients, so that their copies stay the same. Every owner of a
    stage of tie k enters one ALLREDUCE of t.k, as soon as the weight gradients of all these stages, and of the stages
    of earlier ties, are summed up.
    """
    header, table = program.header, program.rows
    if not header.tied:
        return program
    complete = np.full(header.stages, -1, np.int64)  # by stage, the row after which all owners have its gradient
    backwards = program.rows_of(Op.BWD, Op.BWD_W)
    np.maximum.at(complete, table.stage[backwards], rows_at_end(program, backwards, placed.lengths))
    sums = np.flatnonzero(program.is_one_of(Op.ADD, Op.ALLREDUCE) & (table.kind == Kind.DW))
    np.maximum.at(complete, table.stage[sums], sums)
    # Ascending: every rank enters its ties in the order of their numbers.
    after_tie = np.maximum.accumulate([complete[list(stages)].max() for stages in header.tied])
    fields = []
    for tie in range(len(header.tied)):
        sharers = header.sharers(tie)
        fields += [(rank, tie, header.group_numbers[sharers], after_tie[tie]) for rank in sharers]
    rank_, tie_, group, after = np.array(fields, np.int64).T
    return program.insert(rows(Op.ALLREDUCE, rank_, kind=Kind.T, tie=tie_, group=group), after=after)


def optimizer_step(program: Program, _: PlacedScheme) -> Program:
    """The program with NORM on every rank at its end, then STEP for every stage, or shard of one, on every owner.

    Clipping divides by the norm of the whole gradient, to which every stage contributes: no rank steps before all have
    entered NORM.
    """
    header, shards = program.header, program.header.weight_shards
    everyone = header.group_numbers[tuple(range(header.workers))]
    norm = rows(Op.NORM, np.arange(header.workers, dtype=np.int32), group=everyone)
    steps = [(rank, stage, shard) for stage, shard in shards.units for rank in shards.holders(stage, shard)]
    rank, stage, shard = np.array(steps, np.int32).T
    new = concatenate([norm, rows(Op.STEP, rank, stage=stage, shard=shard)])
    return program.insert(new, after=np.full(len(new.op), len(program) - 1))
