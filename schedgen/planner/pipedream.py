"""PipeDream's own schedule: the partition that makes its slowest stage fastest, as 1F1B-RR without a flush."""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedgen.compiler.compile import compile_scheme
from schedgen.ir.program import Program
from schedgen.planner.layer_downsets import in_order
from schedgen.planner.layer_profile import Layers
from schedgen.planner.partition import Level, partition
from schedgen.planner.search import ratios
from schedgen.planner.stage_costs import staged
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import UsageError


def pipedream(layers: Layers, levels: Sequence[Level], microbatches: int, memory: float = math.inf) -> Program:
    """Layers are cut along their order; raises UsageError where no partition fits or there are too few microbatches."""
    order = in_order(layers)
    found = partition(order, levels, memory)
    replicas = tuple(stage.replicas for stage in found.stages)
    if microbatches < max(replicas):
        raise UsageError(f"--microbatches {microbatches}: the partition has a stage of {max(replicas)} replicas")
    sizes = Sizes(len(replicas), microbatches, replicas=replicas)
    cut = staged(layers, order, [stage.end for stage in found.stages], min(level.bandwidth for level in levels))
    scheme = load("pipedream", sizes)
    scheme = scheme._replace(parameters={**scheme.parameters, "layers": list(cut.layers)})
    return compile_scheme(scheme, sizes, cost=ratios(cut.durations(scheme.split)))
