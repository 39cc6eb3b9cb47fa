"""Jobs: one FWD and one BWD (or BWD_I and BWD_W, or none) for every stage and microbatch, in time order.

RECOMPUTE redoes a forward before its backward if the forward keeps nothing, or if its backward runs on another worker,
which has nothing saved.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, Op, W
from schedgen.ir.program import Program, rows
from schedgen.util.arrays import Times
from schedgen.util.sort import stable_order

OPS = {1: (Op.FWD,), 2: (Op.FWD, Op.BWD), 3: (Op.FWD, Op.BWD_I, Op.BWD_W)}


def emit_jobs(header: Header, start: Times, placed: PlacedScheme) -> Program:
    """The program of all jobs; `start`: when every job starts, flat over (direction, stage, microbatch)."""
    d, s, b = (index.ravel() for index in np.indices(header.compute.shape, np.int32))
    worker = header.compute.ravel()
    order = stable_order(worker)
    order = order[np.argsort(start[order], kind="stable")]
    ops = np.array(OPS[len(header.compute)], np.int32)[d]
    if placed.unsplit_backward.any():
        unsplit = placed.unsplit_backward[s, b]
        ops[(d == B) & unsplit] = Op.BWD
        order = order[~((d == W) & unsplit)[order]]
    program = Program(header, rows(ops[order], worker[order], stage=s[order], mb=b[order]), start[order])
    redone = np.flatnonzero(placed.redone[program.rows.stage, program.rows.mb] & (d[order] == B))
    job = order[redone]
    return program.insert(rows(Op.RECOMPUTE, worker[job], stage=s[job], mb=b[job]), after=redone - 1)
