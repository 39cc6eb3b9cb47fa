"""Compute: one FWD and one BWD (or BWD_I and BWD_W) for every stage and microbatch, in time order.

A backward on another worker than its forward needs the stage's saved
activations there, so it redoes the forward first: RECOMPUTE.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.order import Times
from schedgen.program import B, F, Header, Op, Program, W, rows

OPS = {2: (Op.FWD, Op.BWD), 3: (Op.FWD, Op.BWD_I, Op.BWD_W)}


def compute(header: Header, start: Times, whole: NDArray[np.bool_]) -> Program:
    """`start`: when every job starts, flat over (direction, stage, microbatch); `whole` as in `lower`."""
    d, s, b = (index.ravel() for index in np.indices(header.compute.shape, np.int32))
    worker = header.compute.ravel()
    order = np.lexsort((worker, start))
    ops = np.array(OPS[len(header.compute)], np.int32)[d]
    if whole.any():
        ops[(d == B) & whole[s, b]] = Op.BWD
        order = order[~((d == W) & whole[s, b])[order]]
    program = Program(header, rows(ops[order], worker[order], stage=s[order], mb=b[order]), start[order])
    moved = (header.compute[F] != header.compute[B])[s[order], b[order]] & (d[order] == B)
    again = np.flatnonzero(moved)
    new = rows(Op.RECOMPUTE, worker[order][again], stage=s[order][again], mb=b[order][again])
    return program.insert(new, after=again - 1)
