"""A schedule that a script names by its scheme: compiled on rank 0, for the graph of the model's stages."""

from __future__ import annotations

import schedgen
from mpirun.model.contract import Model
from mpirun.model.dataflow import model_graph
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.schemes import load
from schedgen.util.errors import UsageError


def compile_for(model: Model, scheme: str, microbatches: int | None, workers: int) -> Program:
    """The schedule of a built-in scheme, proved. UsageError where these sizes make none."""
    if type(microbatches) is not int or microbatches < 1:
        raise UsageError(f"microbatches: say how many a step of {scheme} has, 1 at least")
    stages = len(model.stages)
    producers = [[p for p, c in chain(stages) if c == stage] for stage in range(stages)]
    graph = model_graph(model.resolved_reads(producers, 1), ([stage for stage, _ in tie] for tie in model.tied))
    sizes = schedgen.Sizes(stages, microbatches, workers)
    loaded = load(scheme, sizes)._replace(edges=graph.edges, per_consumer=graph.per_consumer)
    program = schedgen.compile(loaded, sizes, schedgen.Options(tied=graph.tied))
    schedgen.check(program, f"the schedule {scheme}")
    return program
