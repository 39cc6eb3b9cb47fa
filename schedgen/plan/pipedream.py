"""PipeDream's own schedule: the partition that makes its slowest stage fastest, as 1F1B-RR without a flush."""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedgen.compile import compile_scheme
from schedgen.errors import UsageError
from schedgen.plan.cuts import in_order
from schedgen.plan.partition import Level, partition
from schedgen.plan.profile import Layers
from schedgen.plan.search import ratios
from schedgen.plan.stages import staged
from schedgen.program import Program
from schedgen.scheme import Sizes
from schedgen.schemes import load


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
