"""PipeDream's own schedule: its partition, run as 1F1B-RR without a flush [Narayanan et al. 2019, section 3.2]."""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedgen.checker import check_compiled
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.program import Program
from schedgen.planner.candidates import with_layers
from schedgen.planner.layer_downsets import prefixes
from schedgen.planner.layer_profile import Layers
from schedgen.planner.partition import Level, partition
from schedgen.planner.stage_costs import cost_ratios, stage_costs
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import UsageError


def pipedream(layers: Layers, levels: Sequence[Level], microbatches: int, memory: float = math.inf) -> Program:
    """The program, with layers cut along their order; UsageError if no partition fits or microbatches are too few.

    `memory`: the most bytes that the partition may need on a worker.
    """
    order = prefixes(layers)
    stages = partition(order, levels, memory).stages
    replicas = tuple(stage.replicas for stage in stages)
    if microbatches < max(replicas):
        raise UsageError(f"--microbatches {microbatches}: the partition has a stage of {max(replicas)} replicas")
    sizes = Sizes(len(replicas), microbatches, replicas=replicas)
    costs = stage_costs(layers, order, [stage.end for stage in stages], min(level.bandwidth for level in levels))
    if costs.tied:
        raise UsageError("PipeDream's schedule has weight versions, which tied stages cannot have: leave -o out")
    scheme = with_layers(load("pipedream", sizes), costs)
    program = compile(scheme, sizes, Options(cost=cost_ratios(costs.durations(scheme.split))))
    check_compiled(program)
    return program
