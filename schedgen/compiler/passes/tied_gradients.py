"""Ties: stages that share parameters get the sum of their gradients, so that their copies stay the same.

One ALLREDUCE of t.k by every owner of a stage of tie k, as soon as the weight
gradients of all these stages, and of the ties before, are summed up.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import behind
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program, rows


def tie(program: Program, _: Options) -> Program:
    header, table = program.header, program.rows
    if not header.tied:
        return program
    complete = np.full(header.stages, -1, np.int64)  # behind which row each stage's sum is there, at every owner
    done = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_W)))
    np.maximum.at(complete, table.stage[done], behind(program, done))
    sums = np.flatnonzero(np.isin(table.op, (Op.ADD, Op.ALLREDUCE)) & (table.kind == Kind.DW))
    np.maximum.at(complete, table.stage[sums], sums)
    # Ascending: every rank enters its ties in the order of their numbers.
    place = np.maximum.accumulate([complete[list(stages)].max() for stages in header.tied])
    groups = {group: index for index, group in enumerate(header.groups)}
    fields = [
        (rank, k, groups[header.ties.sharers(k)], place[k])
        for k in range(len(header.tied))
        for rank in header.ties.sharers(k)
    ]
    rank_, k_, peer, after = np.array(fields, np.int64).T
    return program.insert(rows(Op.ALLREDUCE, rank_, kind=Kind.T, stage=k_, peer=peer), after=after)
