"""Weights: a worker that computes a stage it does not own fetches w.s from its owner.

At most `weight_slots` foreign copies are held at a time. The future is known,
so the copy needed furthest ahead goes first, which gives the fewest fetches
possible [Belady, "A study of replacement algorithms", 1966].

A fetch stands before the job its owner is busy with when the copy is needed:
there the owner can still send it in time. It never stands earlier than the
slot it takes is empty.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from schedgen.passes.lookup import home
from schedgen.program import COMPUTE, Kind, Op, Program, rows


def weights(program: Program) -> Program:
    header, table = program.header, program.rows
    owned = np.zeros((header.workers, header.stages), bool)
    for stage, ranks in enumerate(header.owners):
        owned[list(ranks), stage] = True
    compute = np.flatnonzero(np.isin(table.op, COMPUTE))
    foreign = compute[~owned[table.rank[compute], table.stage[compute]]]
    busy = [compute[table.rank[compute] == rank] for rank in range(header.workers)] if len(foreign) else []
    fields: list[tuple[int, int, int, int, int]] = []  # op, rank, stage, peer, after
    for rank in np.unique(table.rank[foreign]).tolist():
        jobs = foreign[table.rank[foreign] == rank]
        uses = table.stage[jobs].tolist()
        next_use = _next_uses(uses)
        serves = {stage: home(program, rank, stage) for stage in set(uses)}
        held: dict[int, int] = {}  # stage -> index of its last use so far
        empty = [-1] * min(header.weight_slots, len(serves))  # rows behind which the free slots are empty
        left: dict[int, int] = {}  # stage -> row behind which its last copy went

        def drop(stage: int) -> None:
            left[stage] = int(jobs[held.pop(stage)])
            heappush(empty, left[stage])
            fields.append((Op.FREE, rank, stage, -1, left[stage]))

        for i, stage in enumerate(uses):
            if stage not in held:
                if not empty:
                    drop(max(held, key=lambda s: next_use[held[s]]))
                owner = serves[stage]
                before = busy[owner][: np.searchsorted(busy[owner], jobs[i])]
                in_time = int(before[-1] if len(before) else jobs[i]) - 1
                at = max(in_time, heappop(empty), left.get(stage, -1))
                fields += [(Op.SEND, owner, stage, rank, at), (Op.FETCH_W, rank, stage, owner, at)]
            held[stage] = i
            if next_use[i] == len(uses):
                drop(stage)
    op, rank_, stage_, peer, after = np.array(fields, np.int64).reshape(-1, 5).T
    return program.insert(rows(op, rank_, kind=Kind.W, stage=stage_, peer=peer), after=after)


def _next_uses(uses: list[int]) -> list[int]:
    """For every i, the next j > i with uses[j] == uses[i], or len(uses)."""
    following: dict[int, int] = {}
    result = [0] * len(uses)
    for i in range(len(uses) - 1, -1, -1):
        result[i] = following.get(uses[i], len(uses))
        following[uses[i]] = i
    return result
