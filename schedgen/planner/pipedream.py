"""PipeDream's own schedule: its partition, run as 1F1B-RR without a flush [Narayanan et al. 2019, section 3.2]."""

from __future__ import annotations

import math

from schedgen.checker import check_compiled
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.program import Program
from schedgen.planner.candidates import with_layers
from schedgen.planner.layer_downsets import prefixes
from schedgen.planner.layer_profile import Layers
from schedgen.planner.partition import Hierarchy, partition
from schedgen.planner.stage_costs import cost_ratios, stage_costs
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import UsageError


def pipedream(layers: Layers, levels: Hierarchy, microbatches: int, memory: float = math.inf) -> Program:
    """The program, with layers cut along their order; UsageError if no partition fits or microbatches are too few.

    `memory`: the most bytes that the partition may need on a worker.
    """
    order = prefixes(layers)
    best = partition(order, levels, memory)
    most = max(best.replicas)
    if microbatches < most:
        raise UsageError(f"--microbatches {microbatches}: the partition has a stage of {most} replicas")
    sizes = Sizes(len(best.stages), microbatches, replicas=best.replicas)
    costs = stage_costs(layers, order, best.ends, levels.slowest)
    if costs.tied:
        raise UsageError("PipeDream's schedule has weight versions, which tied stages cannot have: leave -o out")
    scheme = with_layers(load("pipedream", sizes), costs)
    program = compile(scheme, sizes, Options(cost=cost_ratios(costs.durations(scheme.split))))
    check_compiled(program)
    return program
