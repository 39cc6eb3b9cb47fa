"""Where a number came up that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpirun.engine.interpreter import Result
from mpirun.model.shapes import StageShape
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op


def origin(
    header: Header,
    instructions: Sequence[Instruction],
    shapes: Sequence[StageShape],
    rank: int,
    result: Result,
) -> tuple[int, str] | None:
    """The row of the instruction and what is wrong, on the rank where it began; None on the others.

    The first loss that is not finite; where all are, the gradient of the last
    parameter of the model whose norm is not: backwards come to it first.
    """
    for number, loss in enumerate(result.losses):
        if not math.isfinite(loss):
            for row, i in enumerate(instructions):
                last = not header.graph.consumers[i.stage] and i.stage == header.tensor_parallel.siblings(i.stage)[0]
                if i.op == Op.FWD and last and i.mb == number % header.microbatches:
                    return row, f"the loss is {loss}"
            return None
    place = len(result.norms)
    for stage, shape in reversed(list(enumerate(shapes))):
        place -= len(shape.parameter_names)
        for name, norm in reversed(list(zip(shape.parameter_names, result.norms[place:], strict=False))):
            if not math.isfinite(norm):
                if header.owners[stage][0] != rank:
                    return None
                row = next(row for row, i in enumerate(instructions) if i.op == Op.NORM)
                return row, f"the norm of the gradient of {name}, stage {stage}, is {norm}"
    return None
