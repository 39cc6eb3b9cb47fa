"""A partition, a plan and a found order, as JSON and as lines of text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from schedgen.compiler.sum_trees import ALLREDUCE
from schedgen.ir.instructions import Op
from schedgen.planner.layer_profile import Layers
from schedgen.planner.order_search.question import FoundOrder
from schedgen.planner.partition import Partition, replicated_seconds
from schedgen.planner.plan import Plan
from schedgen.util.errors import clip, number_of
from schedgen.util.text_table import aligned, short_bytes


def partition_as_json(layers: Layers, workers: int, bandwidth: float, partition: Partition) -> dict[str, Any]:
    """The partition and each of its stages; times are seconds a minibatch, weights and memory are bytes a worker."""
    stages = [
        {
            "layers": layers.names[stage.begin : stage.end],
            "replicas": stage.replicas,
            "compute": stage.compute,
            "weight": stage.weight,
            "in_flight": stage.in_flight,
            "memory": stage.memory,
            "time": stage.seconds,
            "transfer": stage.transfer,
        }
        for stage in partition.stages
    ]
    times = [max(stage.seconds, stage.transfer) for stage in partition.stages]
    slowest = times.index(partition.seconds)
    one_worker = float(layers.seconds.sum())
    data_parallel = replicated_seconds(one_worker, float(layers.weight.sum()), workers, bandwidth)
    return {
        "workers": workers,
        "bandwidth": bandwidth if math.isfinite(bandwidth) else None,
        "stage_time": partition.seconds,
        "noam": partition.stages[0].in_flight,
        "bottleneck": {
            "stage": slowest,
            "what": "time" if partition.stages[slowest].seconds == partition.seconds else "transfer",
        },
        "one_worker_time": one_worker,
        "data_parallel_time": data_parallel,
        "speedup_over_one_worker": one_worker / partition.seconds,
        "speedup_over_data_parallel": data_parallel / partition.seconds,
        "stages": stages,
    }


def partition_as_text(numbers: dict[str, Any]) -> Iterator[str]:
    """The numbers of `partition_as_json` as lines: one for each stage, then those of the whole pipeline."""
    rows = [("stage", "layers", "replicas", "compute s", "weights", "in flight", "memory", "time s", "transfer s")]
    for number, stage in enumerate(numbers["stages"]):
        weight, memory = (short_bytes(stage[key]) for key in ("weight", "memory"))
        compute, time, transfer = (f"{stage[key]:.4g}" for key in ("compute", "time", "transfer"))
        replicas, in_flight, count = str(stage["replicas"]), str(stage["in_flight"]), len(stage["layers"])
        layers = clip(stage["layers"][0]) + f" to {clip(stage['layers'][-1])} ({count})" * (count > 1)
        rows.append((str(number), layers, replicas, compute, weight, in_flight, memory, time, transfer))
    yield from aligned(rows, 2)
    slowest = numbers["bottleneck"]["stage"]
    cause = "its own time" if numbers["bottleneck"]["what"] == "time" else "what it receives and sends"
    yield ""
    yield f"{'stage time':18}{numbers['stage_time']:.6g} s a minibatch; the bottleneck is stage {slowest}: {cause}"
    yield f"{'NOAM':18}{number_of(numbers['noam'], 'minibatch')} that each replica of stage 0 has in flight"
    for key, label in (("one_worker", "one worker"), ("data_parallel", "data parallelism")):
        times = f"{numbers[f'speedup_over_{key}']:.3g}"
        yield f"{label:18}{numbers[f'{key}_time']:.6g} s, {'the same' if times == '1' else f'{times} times that'}"


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The front, the fastest first, and how many schedules were searched and simulated."""
    return {
        "schedules": [schedule._asdict() for schedule in plan.front],
        "searched": plan.schedules,
        "simulated": plan.simulated,
    }


def plan_as_text(plan: Plan) -> Iterator[str]:
    """The lines of a plan: one for each schedule of the front, then the counts."""
    ways = ("redone", "offloaded") if any(schedule.offloaded for schedule in plan.front) else ("redone",)
    rows = [("scheme", "stages", "replicas", *ways, "order", "step s", "memory")]
    for schedule in plan.front:
        replicas = clip("-".join(map(str, np.atleast_1d(schedule.replicas)))) + ", interleaved" * schedule.interleave
        replicas += f", {schedule.sums} sums" * (schedule.sums != ALLREDUCE)
        time, memory = f"{schedule.step_time:.4g}", short_bytes(schedule.peak_bytes)
        counts = [str(schedule.recomputed), str(schedule.offloaded)][: len(ways)]
        rows.append((schedule.scheme, str(schedule.stages), replicas, *counts, schedule.order, time, memory))
    yield from aligned(rows, 1)
    layers = "-".join(map(str, plan.front[0].layers))
    yield ""
    yield f"{plan.schedules} schedules, {plan.simulated} simulated; the stages of the first have {layers} layers"


def search_table(found: FoundOrder, objective: str, seconds: float, as_json: bool) -> str:
    """The best value of a search of orders, the bound, and the gap between them, as JSON or in words.

    `seconds`: how long the search took.
    """
    gap = found.value / found.bound - 1
    recomputed, offloaded = (int((found.program.job_rows(op) >= 0).sum()) for op in (Op.RECOMPUTE, Op.OFFLOAD))
    if as_json:
        numbers = {
            "value": found.value, "bound": found.bound, "gap": gap, "optimal": found.optimal, "source": found.source,
            "recomputed": recomputed, "offloaded": offloaded,
            "work": round(found.work, 1), "seconds": round(seconds, 1),
        }  # fmt: skip
        return json.dumps(numbers, indent=1)
    proved = "optimal" if found.optimal else f"no order takes less than {found.bound:.6g}: gap {gap:.1%}"
    counts = (recomputed, "redone"), (offloaded, "offloaded")
    ways = "".join(f"; {count} forwards are {way}" for count, way in counts if count)
    return f"{objective} {found.value:.6g} by {found.source}{ways}; {proved}. {seconds:.0f} s"
