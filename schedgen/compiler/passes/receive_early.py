"""Receiving early: every RECV moves `prefetch` jobs earlier, so that it is posted before the message leaves.

All RECVs of a rank move by the same number of its jobs, so they stay in order. Weight fetches are early enough
already: `weight_fetch` places them as early as its slots allow.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import earlier_compute
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program


def receive_early(program: Program, placed: PlacedScheme) -> Program:
    """The program with every RECV moved directly before the rank's compute instruction `prefetch` jobs earlier."""
    if not placed.options.prefetch:
        return program
    receives = program.rows_of(Op.RECV)
    behind = earlier_compute(program, receives, placed.options.prefetch) - 1
    stays = ~program.is_one_of(Op.RECV)
    kept_until = np.zeros(len(program) + 1, np.int32)  # by row + 1: how many of the rows up to it stay
    kept_until[1:] = np.cumsum(stays)
    after = kept_until[behind + 1]
    order = np.argsort(after, kind="stable")
    places = after[order] + np.arange(len(receives))
    is_moved = np.zeros(len(program), bool)
    is_moved[places] = True
    source = np.empty(len(program), np.int64)  # by new row: its old row
    source[places], source[~is_moved] = receives[order], np.flatnonzero(stays)
    return Program(program.header, program.rows.take(source))
