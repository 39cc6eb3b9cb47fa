"""Ties, spelled out for who follows buffers: what the ALLREDUCE of t.k does to the rank's own sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedgen.check.subject import Numbers, Subject
from schedgen.program import Kind, Op, Program


def spelled_out(subject: Subject) -> tuple[Subject, Numbers]:
    """The program without ties, and for each of its rows the row of `subject` that it stands for.

    ALLREDUCE of t.k becomes ALLREDUCE of dw.s for every stage s of tie k that
    the rank owns; all else stays. It is for following buffers only: the groups
    are not those of the stages.
    """
    table, header = subject.program.rows, subject.header
    ties = np.flatnonzero((table.op == Op.ALLREDUCE) & (table.kind == Kind.T))
    owned = [[s for s in header.tied[table.stage[row]] if subject.owner[table.rank[row], s]] for row in ties]
    count = np.ones(len(subject.program), np.int64)
    count[ties] = [len(stages) for stages in owned]
    origin = np.repeat(np.arange(len(count)), count)
    rows = table.take(origin)
    tied = rows.kind == Kind.T
    stage, kind = rows.stage.copy(), np.where(tied, np.int8(Kind.DW), rows.kind)
    stage[tied] = [s for stages in owned for s in stages]
    plain = Program(replace(header, tied=()), rows._replace(stage=stage, kind=kind))
    return Subject(plain, subject.name), origin
