"""Ties, spelled out for who follows buffers: what the ALLREDUCE of t.k does to the rank's own sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedgen.analysis.subject import Numbers, Subject
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program


def spelled_out(subject: Subject) -> tuple[Subject, Numbers]:
    """The program without ties, and for each of its rows the row of `subject` that it stands for.

    ALLREDUCE of t.k becomes ALLREDUCE of dw.s for every stage s of tie k that
    the rank owns; all else stays. A rank that enters a tie twice is refused:
    the program could grow without bound. It is for following buffers only: the
    groups are not those of the stages.
    """
    table, header = subject.program.rows, subject.header
    ties = np.flatnonzero((table.op == Op.ALLREDUCE) & (table.kind == Kind.T))
    key = table.rank[ties].astype(np.int64) * len(header.tied) + table.stage[ties]
    for row in np.delete(ties, np.unique(key, return_index=True)[1])[:1]:
        subject.refuse(5, int(row), "this tie is summed twice")
    of_tie = [np.array(stages) for stages in header.tied]
    both = zip(table.rank[ties], (of_tie[k] for k in table.stage[ties]), strict=True)
    owned = [stages[subject.owner[rank, stages]] for rank, stages in both]
    count = np.ones(len(subject.program), np.int64)
    count[ties] = [len(stages) for stages in owned]
    origin = np.repeat(np.arange(len(count)), count)
    rows = table.take(origin)
    tied = rows.kind == Kind.T
    stage, kind = rows.stage.copy(), np.where(tied, np.int8(Kind.DW), rows.kind)
    stage[tied] = np.concatenate([*owned, np.zeros(0, np.int32)])
    plain = Program(replace(header, tied=()), rows._replace(stage=stage, kind=kind))
    return Subject(plain, subject.name), origin
