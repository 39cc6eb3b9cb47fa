"""A schedule that a script names by its scheme: compiled on rank 0, for the graph of the model's stages."""

from __future__ import annotations

import schedgen
from mpirun.model.contract import Model
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.util.errors import UsageError


def compile_for(model: Model, scheme: str, microbatches: int | None, workers: int) -> Program:
    """The schedule of a built-in scheme, checked. UsageError if these sizes make none."""
    if type(microbatches) is not int or microbatches < 1:
        raise UsageError(f"microbatches: say how many a step of {scheme} has, 1 at least")
    graph, sizes = model.graph(), schedgen.Sizes(len(model.stages), microbatches, workers)
    loaded = load(scheme, sizes)._replace(edges=graph.edges, per_consumer=graph.per_consumer)
    program = schedgen.compile(loaded, sizes, schedgen.Options(tied=graph.tied))
    schedgen.check(program, f"the schedule {scheme}")
    return program
