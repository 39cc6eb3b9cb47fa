"""Compute: one FWD and one BWD (or BWD_I and BWD_W) for every stage and microbatch, in time order.

Where memory is to be saved, the forward keeps nothing and is redone before the
backward: RECOMPUTE. So it is where the backward is on another worker than the
forward, which has what was saved.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.order import Times
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Op, W
from schedgen.ir.program import Program, rows

OPS = {2: (Op.FWD, Op.BWD), 3: (Op.FWD, Op.BWD_I, Op.BWD_W)}


def compute(header: Header, start: Times, options: Options) -> Program:
    """`start`: when every job starts, flat over (direction, stage, microbatch)."""
    whole = options.whole
    d, s, b = (index.ravel() for index in np.indices(header.compute.shape, np.int32))
    worker = header.compute.ravel()
    order = np.lexsort((worker, start))
    ops = np.array(OPS[len(header.compute)], np.int32)[d]
    if whole.any():
        ops[(d == B) & whole[s, b]] = Op.BWD
        order = order[~((d == W) & whole[s, b])[order]]
    program = Program(header, rows(ops[order], worker[order], stage=s[order], mb=b[order]), start[order])
    redone = options.recompute | (header.compute[F] != header.compute[B])
    again = np.flatnonzero(redone[s[order], b[order]] & (d[order] == B))
    new = rows(Op.RECOMPUTE, worker[order][again], stage=s[order][again], mb=b[order][again])
    return program.insert(new, after=again - 1)
