"""The end of the step: NORM on every rank, then STEP for every stage, or shard of one, on every owner.

Clipping divides by the norm of the whole gradient, to which every stage contributes: no rank steps before all have
entered NORM.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program, concatenate, rows


def optimizer_step(program: Program, _: PlacedScheme) -> Program:
    """NORM and STEP at the end of the program."""
    header, shards = program.header, program.header.weight_shards
    everyone = header.group_numbers[tuple(range(header.workers))]
    norm = rows(Op.NORM, np.arange(header.workers, dtype=np.int32), group=everyone)
    steps = [(rank, stage, shard) for stage, shard in shards.units for rank in shards.holders(stage, shard)]
    rank, stage, shard = np.array(steps, np.int32).T
    new = concatenate([norm, rows(Op.STEP, rank, stage=stage, shard=shard)])
    return program.insert(new, after=np.full(len(new.op), len(program) - 1))
