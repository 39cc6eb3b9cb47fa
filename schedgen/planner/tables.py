"""A partition and what a search found, in words and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from schedgen.planner.layer_downsets import Cuts
from schedgen.planner.layer_profile import Layers
from schedgen.planner.partition import Level, Partition, data_parallel
from schedgen.planner.search import Found
from schedgen.util.errors import clip


def as_json(layers: Layers, cuts: Cuts, levels: Sequence[Level], found: Partition) -> dict[str, Any]:
    """Seconds a minibatch, bytes."""
    workers = math.prod(level.components for level in levels)
    stages = []
    for one in found.stages:
        lie = cuts.layers[one.end] & ~cuts.layers[one.begin]
        kept, weight, seconds = (
            float(sums[one.end] - sums[one.begin]) for sums in (cuts.kept, cuts.weight, cuts.seconds)
        )
        stages.append(
            {
                "layers": [name for name, inside in zip(layers.names, lie, strict=True) if inside],
                "replicas": one.replicas,
                "compute": seconds,
                "weight": weight,
                "in_flight": one.in_flight,
                "memory": one.in_flight * (kept + weight),
                "time": one.seconds,
                "transfer": one.transfer,
            }
        )
    times = [max(one.seconds, one.transfer) for one in found.stages]
    slowest = times.index(found.seconds)
    alone, parallel = float(cuts.seconds[-1]), data_parallel(cuts, levels)
    return {
        "workers": workers,
        "topology": [level.components for level in levels],
        "bandwidth": [level.bandwidth for level in levels],
        "stage_time": found.seconds,
        "noam": found.stages[0].in_flight,
        "bottleneck": {
            "stage": slowest,
            "what": "time" if found.stages[slowest].seconds == found.seconds else "transfer",
        },
        "one_worker_time": alone,
        "data_parallel_time": parallel,
        "speedup_over_one_worker": alone / found.seconds,
        "speedup_over_data_parallel": parallel / found.seconds,
        "all_cuts": cuts.every,
        "stages": stages,
    }


def table(numbers: dict[str, Any]) -> Iterator[str]:
    """The same to read: a row a stage, then the whole."""
    titles = (
        "stage",
        "layers",
        "replicas",
        "compute s",
        "weights",
        "in flight",
        "memory",
        "time s",
        "transfer s",
    )
    rows = [titles]
    for number, one in enumerate(numbers["stages"]):
        weight, memory = (_bytes(one[what]) for what in ("weight", "memory"))
        compute, time, transfer = (f"{one[what]:.4g}" for what in ("compute", "time", "transfer"))
        rows.append(
            (str(number), _names(one["layers"]), str(one["replicas"]), compute, weight, str(one["in_flight"]), memory,
             time, transfer)
        )  # fmt: skip
    yield from _columns(rows, 2)
    slowest = numbers["bottleneck"]["stage"]
    what = "itself" if numbers["bottleneck"]["what"] == "time" else "what it receives and sends"
    yield ""
    yield f"{'stage time':18}{numbers['stage_time']:.6g} s a minibatch; the bottleneck is stage {slowest}: {what}"
    noam = numbers["noam"]
    yield f"{'NOAM':18}{noam} minibatch{'es' * (noam != 1)} that each replica of stage 0 has in flight"
    for key, words in (("one_worker", "one worker"), ("data_parallel", "data parallelism")):
        times = f"{numbers[f'speedup_over_{key}']:.3g}"
        yield f"{words:18}{numbers[f'{key}_time']:.6g} s, {'the same' if times == '1' else f'{times} times that'}"


def schedules_as_json(found: Found) -> dict[str, Any]:
    """What a search found: `schedules`, the front, the fastest first."""
    return {
        "schedules": [row._asdict() for row in found.front],
        "searched": found.schedules,
        "simulated": found.simulated,
    }


def schedules(found: Found) -> Iterator[str]:
    """The same to read."""
    rows = [("scheme", "stages", "replicas", "recompute", "step s", "memory")]
    for one in found.front:
        replicas = str(one.replicas) if isinstance(one.replicas, int) else clip("-".join(map(str, one.replicas)))
        again = "all" if one.recompute else "none"
        rows.append((one.scheme, str(one.stages), replicas, again, f"{one.step_time:.4g}", _bytes(one.peak_bytes)))
    yield from _columns(rows, 1)
    layers = "-".join(map(str, found.front[0].layers))
    yield ""
    yield f"{found.schedules} schedules, {found.simulated} simulated; the stages of the first have {layers} layers"


def _columns(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """Cells under each other, those of the first columns to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in cells)


def _names(names: Sequence[str]) -> str:
    first, last = clip(names[0]), clip(names[-1])
    return first if len(names) == 1 else f"{first} to {last} ({len(names)})"


def _bytes(count: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
