"""The end of the step: NORM on every rank, then STEP for every stage, or part of one, on every owner.

The norm of the whole gradient, which clipping divides by, needs every stage's
gradient: no rank steps before all have theirs.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.options import Options
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program, concatenate, rows


def step(program: Program, _: Options) -> Program:
    header = program.header
    everyone = header.groups.index(tuple(range(header.workers)))
    norm = rows(Op.NORM, np.arange(header.workers, dtype=np.int32), peer=everyone)
    owned = [
        (rank, stage, via)
        for stage, via in header.weight_shards.units
        for rank in header.weight_shards.holders(stage, via)
    ]
    rank, stage, via_ = np.array(owned, np.int32).T
    new = concatenate([norm, rows(Op.STEP, rank, stage=stage, via=via_)])
    return program.insert(new, after=np.full(len(new.op), len(program) - 1))
