"""Receives stand `prefetch` jobs earlier than their SEND: posted before the message leaves.

All RECVs of a rank move by the same number of its jobs, so they stay in
order. Weight fetches are hoisted where they are made, within their slots.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import earlier_compute
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program


def hoist(program: Program, options: Options) -> Program:
    if not options.prefetch:
        return program
    receives = np.flatnonzero(program.rows.op == Op.RECV)
    to = earlier_compute(program, receives, options.prefetch) - 1
    rest = np.ones(len(program), bool)
    rest[receives] = False
    # Places among the rows that stay.
    before = np.cumsum(rest)
    assert program.time is not None
    kept = Program(program.header, program.rows.take(np.flatnonzero(rest)), program.time[rest])
    return kept.insert(program.rows.take(receives), after=np.where(to < 0, 0, before[np.maximum(to, 0)]) - 1)
