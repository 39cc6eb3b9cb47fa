"""Reduction: every owner of a stage gets the sum of its weight gradients, in a fixed order.

A worker that does not own the stage sends dw.s to its owner once, when its
last backward of the stage is done. An owner adds what arrives in order of
arrival, one message behind the receives and the last one behind its next job,
so that a transfer overlaps other work and at most two partials of a stage lie
there at a time. Several owners then sum up among themselves: one ALLREDUCE,
as soon as the last of them has its part.
"""

from __future__ import annotations

import numpy as np

from schedgen.passes.lookup import home, next_compute
from schedgen.program import Kind, Op, Program, rows


def reduce(program: Program) -> Program:
    header, table = program.header, program.rows
    assert program.time is not None
    groups = {group: index for index, group in enumerate(header.groups)}
    done = np.flatnonzero((table.op == Op.BWD) | (table.op == Op.BWD_W))
    final = np.full((header.stages, header.workers), -1, np.int64)  # last backward of a stage on a worker
    np.maximum.at(final, (table.stage[done], table.rank[done]), done)
    last_job = header.cost.get("W", header.cost.get("B", 0))
    ended = program.time[final] + np.where(table.op[final] == Op.BWD, last_job + header.cost.get("I", 0), last_job)
    # The last row that happens before that backward has ended.
    last = np.where(final < 0, -1, np.maximum(np.searchsorted(program.time, ended) - 1, final))
    fields: list[tuple[int, int, int, int, int]] = []  # op, rank, stage, peer, after
    for stage, owners in enumerate(header.owners):
        complete = int(last[stage, list(owners)].max())
        partials = [rank for rank in np.flatnonzero(last[stage] >= 0).tolist() if rank not in owners]
        waiting: dict[int, int] = {}  # owner -> sender whose partial is not added yet
        for rank in sorted(partials, key=lambda r: int(last[stage, r])):
            owner, at = home(program, rank, stage), int(last[stage, rank])
            fields += [(Op.SEND, rank, stage, owner, at), (Op.RECV, owner, stage, rank, at)]
            if owner in waiting:
                fields.append((Op.ADD, owner, stage, waiting[owner], at))
            waiting[owner] = rank
            complete = max(complete, at)
        for owner, sender in sorted(waiting.items()):
            at = int(next_compute(program, np.array([complete]), np.array([owner]))[0])
            fields.append((Op.ADD, owner, stage, sender, at))
            complete = max(complete, at)
        if len(owners) > 1:
            fields += [(Op.ALLREDUCE, owner, stage, groups[owners], complete) for owner in owners]
    op, rank_, stage_, peer, after = np.array(fields, np.int64).reshape(-1, 5).T
    return program.insert(rows(op, rank_, kind=Kind.DW, stage=stage_, peer=peer), after=after)
