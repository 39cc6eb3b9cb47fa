"""Finds where a non-finite number first appeared: in which instruction of which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpirun.engine.core.optimizer_step import StepResult
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op


def find_nonfinite(
    header: Header,
    instructions: Sequence[Instruction],
    shapes: Sequence[StageShape],
    rank: int,
    result: StepResult,
) -> tuple[int, str] | None:
    """(row, description) of the first number that is not finite, on the rank of that row; None on the other ranks.

    `instructions`: the list of `rank`. The number is the first such loss or, if all losses are finite, the last such
    norm of a parameter's gradient in the order of the model, because backwards reach that parameter first.
    """
    for number, loss in enumerate(result.losses):
        if not math.isfinite(loss):
            for row, i in enumerate(instructions):
                records = not header.graph.consumers[i.stage] and header.is_first_slice(i.stage)
                if i.op == Op.FWD and records and i.mb == number % header.microbatches:
                    return row, f"the loss is {loss}"
            return None
    end = len(result.parameter_norms)
    for stage, shape in reversed(list(enumerate(shapes))):
        norms = result.parameter_norms[end - len(shape.parameter_names) : end]
        end -= len(norms)
        for name, norm in reversed(list(zip(shape.parameter_names, norms, strict=True))):
            if not math.isfinite(norm):
                if header.owners[stage][0] != rank:
                    return None
                row = next(row for row, i in enumerate(instructions) if i.op == Op.NORM)
                return row, f"the norm of the gradient of {name}, stage {stage}, is {norm}"
    return None
