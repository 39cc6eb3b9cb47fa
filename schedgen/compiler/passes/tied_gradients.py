"""Ties: stages that share parameters get the sum of their gradients, so that their copies stay the same.

Every owner of a stage of tie k enters one ALLREDUCE of t.k, as soon as the weight gradients of all these stages, and
of the stages of earlier ties, are summed up.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import rows_at_end
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program, rows


def tied_gradients(program: Program, placed: PlacedScheme) -> Program:
    """The program with the ALLREDUCEs of all ties, after the reduction of weight gradients."""
    header, table = program.header, program.rows
    if not header.tied:
        return program
    complete = np.full(header.stages, -1, np.int64)  # by stage, the row after which all owners have its gradient
    backwards = program.rows_of(Op.BWD, Op.BWD_W)
    np.maximum.at(complete, table.stage[backwards], rows_at_end(program, backwards, placed.exact_cost))
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
