"""What a schedule must know of a model that is no chain: `compile --graph` reads what `mpirun graph` writes.

A JSON object with `stages`, a number; `edges`, pairs [producer, consumer];
and, where there are any, `apart`, the stages of whose output each of several
consumers reads a part of its own, and `tied`, lists of stages that share
parameters.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple

from schedgen.ir.stage_graph import check_edges
from schedgen.util.errors import UsageError, clip

MOST_STAGES = 2**20


class Dag(NamedTuple):
    stages: int
    edges: tuple[tuple[int, int], ...]
    apart: tuple[int, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()


def read_dag(text: str, name: str) -> Dag:
    """Raises UsageError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON: {error}") from None
    if isinstance(values, dict) and values.get("stages") == 1:
        values = {"edges": []} | values
    if not isinstance(values, dict) or not {"stages", "edges"} <= values.keys() <= set(Dag._fields):
        raise UsageError(f"{name}: should be an object with stages and edges, and perhaps apart and tied")
    stages = values["stages"]
    if type(stages) is not int or not 1 <= stages <= MOST_STAGES:
        raise UsageError(f"{name}: stages should be a whole number of at least 1, not {clip(repr(stages))}")
    lists = [*_lists(values["edges"]), *_lists([values.get("apart", [])]), *_lists(values.get("tied", []))]
    if not all(isinstance(one, list) and all(type(stage) is int for stage in one) for one in lists):
        raise UsageError(f"{name}: edges and tied should be lists of lists of stages, and apart a list of stages")
    if not all(0 <= stage < stages for one in lists for stage in one):
        raise UsageError(f"{name}: it names a stage that is not in 0..{stages - 1}")
    try:
        edges = check_edges(values["edges"], stages)
        apart = check_apart(values.get("apart", []), edges)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return Dag(stages, edges, apart, tuple(map(tuple, values.get("tied", []))))


def check_apart(stages: Any, edges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The stages, ascending; UsageError where one has no two consumers."""
    readers = Counter(producer for producer, _ in edges)
    found = set[int]()
    for stage in stages:
        number = None
        with suppress(TypeError):  # no whole number
            number = index(stage)
        if number is None or readers[number] < 2:
            raise UsageError(f"apart: the output of stage {clip(repr(stage))} is not read by several stages")
        found.add(number)
    return tuple(sorted(found))


def _lists(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
