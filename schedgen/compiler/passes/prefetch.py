"""Prefetch: every RECV moves `prefetch` jobs forwards, so that it is posted before the message leaves.

All RECVs of a rank move by the same number of its jobs, so they stay in order. Weight fetches stand early enough
already: `weight_fetch` puts them as early as its slots allow.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import earlier_compute
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program


def prefetch(program: Program, placed: PlacedScheme) -> Program:
    """The program with its RECVs earlier, each directly before the compute instruction that many jobs back."""
    if not placed.options.prefetch:
        return program
    receives = np.flatnonzero(program.rows.op == Op.RECV)
    behind = earlier_compute(program, receives, placed.options.prefetch) - 1
    rest = np.ones(len(program), bool)
    rest[receives] = False
    kept_until = np.zeros(len(program) + 1, np.int64)  # by row + 1: how many of the rows up to it stay
    np.cumsum(rest, out=kept_until[1:])
    assert program.time is not None
    kept = Program(program.header, program.rows.take(np.flatnonzero(rest)), program.time[rest])
    return kept.insert(program.rows.take(receives), after=kept_until[behind + 1] - 1)
