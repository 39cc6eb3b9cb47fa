"""Read the header from its JSON object, and check every value.

Nothing that comes from a file is trusted: a number is compared with the header's sizes before anything is built from
it, and the header's sizes with the number of instructions in the file before memory is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from schedgen.ir.cost import REDO
from schedgen.ir.header import Header, owners_of
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.limits import MOST_PAIRS, MOST_RATIO, MOST_TIES, MOST_USES, Limits
from schedgen.ir.stage_graph import StageGraph, check_edges
from schedgen.ir.tensor_parallel import TensorParallel, check_slices_apart
from schedgen.ir.weight_versions import STASH, TWO_BUFFERS, VERTICAL
from schedgen.util.arrays import Ints
from schedgen.util.errors import UsageError, clip

LARGEST = 2**31 - 1  # any number in a file fits an int32
KEYS = ("generator", "scheme", "order", "lowering", "edges", "tied", "owners", "groups", "weights", "compute")
OPTIONAL_KEYS = ("per_consumer", "shards", "tensor")

# The least value of each number of the lowering.
_LEAST = {"weight_slots": 1, "fan_out": 1, "prefetch": 0, "memory_limit": 1, "accumulated": 1}
_OPTIONAL_LOWERING = ("memory_limit", "updates", "accumulated")
_LOWERING = ("weight_slots", "fan_out", "prefetch", "recompute", *_OPTIONAL_LOWERING)  # in this order


class Wrong(Exception):
    """The header's entry `key` is wrong."""

    def __init__(self, key: str, reason: str) -> None:
        """`reason` is a sentence that names the entry."""
        super().__init__(reason)
        self.key = key


def read_limits(raw: Mapping[str, Any]) -> Limits:
    """The limits that a header sets; Wrong if one is missing or wrong."""
    scheme = raw.get("scheme")
    if not isinstance(scheme, dict) or not isinstance(scheme.get("name"), str):
        raise Wrong("scheme", "scheme must be an object with a name")
    for key in ("workers", "stages", "microbatches"):
        if not _is_whole(scheme.get(key), 1, LARGEST):
            raise Wrong("scheme", f"scheme: {key} must be a whole number from 1 to {LARGEST}")
    workers, stages, microbatches = scheme["workers"], scheme["stages"], scheme["microbatches"]
    for value in (*scheme, *scheme.values()):
        by_stage = isinstance(value, list) and stages in _stage_counts(raw, len(value))
        if by_stage and all(_is_whole(number, 1, LARGEST) for number in value):
            continue
        if type(value) is not int and not _is_printable(value):
            raise Wrong("scheme", "scheme: values must be numbers, printable strings or lists of one number per stage")
    _check_layers(raw, stages)
    groups, tied, lowering = raw.get("groups"), raw.get("tied"), raw.get("lowering")
    if not isinstance(groups, list):
        raise Wrong("groups", "groups must be a list of lists of ranks")
    if not isinstance(tied, list):
        raise Wrong("tied", "tied must be a list of lists of stages")
    versions = microbatches + 1 if isinstance(lowering, dict) and "updates" in lowering else 0
    shards = _shards(raw["shards"], workers, stages) if "shards" in raw else ()
    return Limits(workers, stages, microbatches, len(groups), len(tied), versions, shards)


def _stage_counts(raw: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """The numbers of stages for which a list of `length` has an entry a stage of the scheme, or of the model."""
    substages = raw["scheme"].get("substages", 1)
    return tuple(length * _degree(raw) * p for p in (1, substages) if _is_whole(p, 1, LARGEST))


def _degree(raw: Mapping[str, Any]) -> int:
    """The slices of each stage that a header claims, not checked yet; 0 if the claim is not a number."""
    degree = raw["tensor"].get("degree") if isinstance(raw.get("tensor"), dict) else 1
    return degree if type(degree) is int else 0


def _check_layers(raw: Mapping[str, Any], stages: int) -> None:
    """Check `layers`, by which the runtime cuts a model: a number for each stage of the model."""
    layers = raw["scheme"].get("layers")
    if "layers" in raw["scheme"] and not (isinstance(layers, list) and len(layers) * _degree(raw) == stages):
        raise Wrong("scheme", "scheme: layers must be a list of a number for each stage of the model")


def _shards(value: object, workers: int, stages: int) -> tuple[int, ...]:
    """By stage, the number of shards of its weights."""
    if not isinstance(value, list) or len(value) != stages or not all(isinstance(ranks, list) for ranks in value):
        raise Wrong("shards", f"shards must be a list of {stages} lists of ranks")
    if not all(ranks and all(_is_whole(rank, 0, workers - 1) for rank in ranks) for ranks in value):
        raise Wrong("shards", f"shards must name an owner in 0..{workers - 1} of every shard of every stage")
    counts = tuple(len(ranks) for ranks in value)
    if max(counts) == 1:
        raise Wrong("shards", "shards must divide a stage, or be left out")
    return counts


def read_header(raw: Mapping[str, Any], limits: Limits, jobs: int) -> Header:
    """The header; `jobs`, the number of instructions, limits the memory it takes. Wrong names the entry at fault."""
    order = _order(raw.get("order"))
    shape = (len(set(order["cost"]) - {REDO}), limits.stages, limits.microbatches)
    _check_sizes(shape, limits, jobs)
    if not _is_printable(raw.get("generator")):
        raise Wrong("generator", "generator must be a printable string")
    tensor_parallel = _tensor_parallel(raw, limits)
    edges = _edges(raw.get("edges"), limits, tensor_parallel.degree)
    if len(edges) * limits.microbatches > _room(jobs, shape):  # each has a gradient a microbatch, with a FREE
        raise Wrong("edges", f"edges ask for more gradients than {jobs} instructions can compute")
    header = Header(
        scheme=raw["scheme"],
        mode=order["mode"],
        n=order["n"],
        cost=order["cost"],
        lowering=_lowering(raw.get("lowering"), limits),
        graph=StageGraph(limits.stages, edges, _per_consumer(raw, edges, limits)),
        tied=_tied(raw.get("tied"), limits),
        groups=_groups(raw.get("groups"), limits),
        compute=_placement(raw, "compute", shape, limits),
        weights=_placement(raw, "weights", _weights_shape(raw, shape), limits),
        generator=raw["generator"],
        shard_owners=tuple(map(tuple, raw.get("shards", ()))),
        tensor_parallel=tensor_parallel,
    )
    _check_shards(header, jobs)
    if header.is_forward:
        _check_forward(header)
    if tensor_parallel:
        _check_tensor_parallel(header)
    if _lists("owners", raw.get("owners"), "ranks", limits.workers) != header.owners:
        raise Wrong("owners", "owners do not agree with weights")
    if set(raw) - {"schedgen", "programs", "sha256", *OPTIONAL_KEYS} != set(KEYS):
        raise Wrong("schedgen", f"the header must have exactly {', '.join(KEYS)}")
    return header


def _order(value: object) -> dict[str, Any]:
    """Check the entry `order`: mode, n and cost."""
    if not isinstance(value, dict) or set(value) != {"mode", "n", "cost"} or not _is_printable(value["n"]):
        raise Wrong("order", "order must have mode, n and cost")
    if value["mode"] not in ("greedy", "strict"):
        raise Wrong("order", "order: mode must be greedy or strict")
    cost = value["cost"]
    if not isinstance(cost, dict) or tuple(name for name in cost if name != REDO) not in DIRECTIONS.values():
        raise Wrong("order", "order: cost must have F and B, or F, I and W, or F of forwards alone; and may have R")
    redo = cost.get(REDO, 0)
    times = [time for name, time in cost.items() if name != REDO]
    is_redo_time = type(redo) in (int, float) and 0 <= redo < 1e12
    if not all(type(time) in (int, float) and 1e-12 < time < 1e12 for time in times) or not is_redo_time:
        raise Wrong("order", "order: costs must be numbers from 1e-12 to 1e12, R from 0 on")
    if max(times) > MOST_RATIO * min(times):
        raise Wrong("order", "order: the largest cost may be a million times the smallest, not more")
    return value


def _room(jobs: int, shape: tuple[int, int, int]) -> int:
    """The most edges x microbatches, or shards, for `jobs` instructions: as many, times MOST_USES in forwards alone."""
    return jobs * MOST_USES if shape[0] == 1 else jobs


def _check_sizes(shape: tuple[int, int, int], limits: Limits, jobs: int) -> None:
    least = shape[0] * shape[1] * shape[2]
    if shape[0] > 1:  # every rank enters NORM; in a list of forwards alone a rank's list may be empty
        least = max(least, limits.workers)
    if least > jobs or limits.workers * limits.stages > MOST_PAIRS:
        raise Wrong("scheme", f"the sizes ask for more jobs or workers than {jobs} instructions can serve")
    shards = sum(limits.shards)
    if limits.workers * shards > MOST_PAIRS or shards > _room(jobs, shape):  # every shard has a STEP
        raise Wrong("shards", f"shards ask for more shards than {jobs} instructions can serve")


def _tensor_parallel(raw: Mapping[str, Any], limits: Limits) -> TensorParallel:
    if "tensor" not in raw:
        return TensorParallel(1, (), limits.stages)
    value = raw["tensor"]
    if not isinstance(value, dict) or set(value) != {"degree", "replicated"}:
        raise Wrong("tensor", "tensor must have degree and replicated")
    degree = value["degree"]
    if not _is_whole(degree, 2, limits.stages) or limits.stages % degree:
        raise Wrong("tensor", f"tensor: degree must be at least 2 and divide the {limits.stages} stages")
    (replicated,) = _lists("tensor", [value["replicated"]], "stages", limits.stages // degree)
    if replicated[-1] != limits.stages // degree - 1:
        raise Wrong("tensor", "tensor: the last stage, which ends in the loss, must be replicated")
    if limits.versions:
        raise Wrong("tensor", "tensor: weights that have versions have no slices")
    return TensorParallel(degree, replicated, limits.stages)


def _check_shards(header: Header, jobs: int) -> None:
    """Check `shards` against the other entries."""
    for stage, ranks in enumerate(header.shard_owners):
        if (header.weights[:, stage] != ranks[0]).any():
            raise Wrong("shards", f"shards: the first owner of stage {stage} is not the worker that weights names")
    if header.shard_uses() > MOST_USES * jobs:
        raise Wrong("shards", f"shards ask for more shards of weights than {jobs} instructions can use")
    if header.shard_owners and (header.stepped_together or not header.has_flush):
        raise Wrong("shards", "shards: weights that are tied, have versions or belong to tensor slices are not divided")


def _check_forward(header: Header) -> None:
    """Check the header of a list of forwards alone."""
    if header.tied:
        raise Wrong("tied", "tied: a list of forwards sums no gradients, so it has no ties")
    if header.lowering["recompute"] or not header.has_flush:
        raise Wrong("lowering", "lowering: a list of forwards redoes nothing and makes no versions of weights")
    if header.memory_limit is not None:
        raise Wrong("lowering", "lowering: a list of forwards saves nothing, so it has no memory_limit")
    if len(header.weights) > 1 and owners_of(header.weights) == owners_of(header.weights[:1]):
        raise Wrong("weights", "weights: a list of forwards should have the direction F alone, as F names all owners")


def _check_tensor_parallel(header: Header) -> None:
    try:
        check_slices_apart(header.compute, header.tensor_parallel.degree, header.directions)
    except UsageError as error:
        raise Wrong("compute", str(error)) from None
    if header.tensor_parallel.sliced[list(header.graph.per_consumer)].any():
        raise Wrong("per_consumer", "per_consumer: the output of a sliced stage is one sum, the same for all consumers")


def _lowering(value: object, limits: Limits) -> dict[str, Any]:
    if not isinstance(value, dict) or {*value, *_OPTIONAL_LOWERING} != set(_LOWERING):
        needed = ", ".join(key for key in _LOWERING if key not in _OPTIONAL_LOWERING)
        raise Wrong("lowering", f"lowering must have {needed}, and may have {', '.join(_OPTIONAL_LOWERING)}")
    if value.get("updates", STASH) not in (STASH, VERTICAL, TWO_BUFFERS):
        raise Wrong("lowering", "lowering: updates must be stash, vertical or 2bw, or be left out")
    if ("accumulated" in value) != (value.get("updates") == TWO_BUFFERS):
        raise Wrong("lowering", "lowering: accumulated belongs to updates 2bw, and to no others")
    for key, least in _LEAST.items():
        if key in value and not _is_whole(value[key], least, LARGEST):
            raise Wrong("lowering", f"lowering: {key} must be a whole number of at least {least}")
    if not isinstance(value["recompute"], list) or not all(_is_redone(each, limits) for each in value["recompute"]):
        raise Wrong("lowering", "lowering: recompute must be a list of stages, or pairs of a stage and a microbatch")
    return {key: value[key] for key in _LOWERING if key in value}


def _is_redone(each: object, limits: Limits) -> bool:
    """Whether `each` is a stage, or a pair of a stage and a microbatch."""
    stage, mb = each if isinstance(each, list) and len(each) == 2 else (each, 0)
    return _is_whole(stage, 0, limits.stages - 1) and _is_whole(mb, 0, limits.microbatches - 1)


def _edges(value: object, limits: Limits, degree: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(_is_whole(end, -LARGEST, LARGEST) for end in pair)
        for pair in value
    ):
        raise Wrong("edges", "edges must be a list of pairs of stages")
    try:
        return check_edges(value, limits.stages, degree)
    except UsageError as error:
        raise Wrong("edges", str(error)) from None


def _per_consumer(raw: Mapping[str, Any], edges: tuple[tuple[int, int], ...], limits: Limits) -> tuple[int, ...]:
    if "per_consumer" not in raw:
        return ()
    (stages,) = _lists("per_consumer", [raw["per_consumer"]], "stages", limits.stages)
    consumers = Counter(producer for producer, _ in edges)
    if not all(consumers[stage] > 1 for stage in stages):
        raise Wrong("per_consumer", "per_consumer must name stages that several stages read")
    return stages


def _tied(value: object, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """The ties; t.k names one by its position, so lists out of order are refused, not sorted."""
    ties = _lists("tied", value, "stages", limits.stages)
    if any(len(stages) < 2 for stages in ties) or list(ties) != sorted(set(ties)):
        raise Wrong("tied", "tied must have two stages or more in each list, and different lists, ascending")
    if max(Counter(stage for stages in ties for stage in stages).values(), default=0) > MOST_TIES:
        raise Wrong("tied", f"tied must have no stage in more than {MOST_TIES} lists")
    return ties


def _lists(key: str, value: object, what: str, limit: int) -> tuple[tuple[int, ...], ...]:
    """Lists of stages or ranks below `limit`, each ascending and not empty."""
    if not isinstance(value, list):
        raise Wrong(key, f"{key} must be a list of lists of {what}")
    for numbers in value:
        whole = isinstance(numbers, list) and numbers and all(_is_whole(number, 0, limit - 1) for number in numbers)
        if not whole or numbers != sorted(set(numbers)):
            raise Wrong(key, f"{key} must be lists of different {what} in 0..{limit - 1}, ascending")
    return tuple(map(tuple, value))


def _groups(value: object, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """The groups; collectives name them by position, so no two may have the same ranks."""
    groups = _lists("groups", value, "ranks", limits.workers)
    for ranks, count in Counter(groups).items():
        if count > 1:
            raise Wrong("groups", f"groups must be different, but {clip(str(list(ranks)))} is listed {count} times")
    return groups


def _weights_shape(raw: Mapping[str, Any], shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape of `weights`, which may have the directions of training even in a list of forwards alone."""
    named = raw.get("weights")
    if shape[0] > 1 or not isinstance(named, dict):
        return shape
    return next((d, *shape[1:]) for d in (1, 2, 3) if d == 3 or set(named) <= set(DIRECTIONS[d]))


def _placement(raw: Mapping[str, Any], key: str, shape: tuple[int, int, int], limits: Limits) -> Ints:
    """The workers of all jobs, of `shape` (directions, stages, microbatches)."""
    value, names = raw.get(key), DIRECTIONS[shape[0]]
    if not isinstance(value, dict) or names[0] not in value or not set(value) <= set(names):
        more = f" and may have {', '.join(names[1:])}" if names[1:] else " alone"
        raise Wrong(key, f"{key} must have {names[0]}{more}")
    placement = np.empty(shape, np.int32)
    for d, name in enumerate(names):
        if name not in value:
            placement[d] = placement[d - 1]
            continue
        stages = value[name]
        if not isinstance(stages, list) or len(stages) != shape[1]:
            raise Wrong(key, f"{key} {name} must list {shape[1]} stages")
        for s, row in enumerate(stages):
            workers = row if isinstance(row, list) else [row]
            if isinstance(row, list) and len(row) != shape[2]:
                raise Wrong(key, f"{key} {name}: stage {s} must be a worker or a list of {shape[2]}")
            if not all(type(worker) is int and 0 <= worker < limits.workers for worker in workers):
                raise Wrong(key, f"{key} {name}: stage {s} names a worker outside 0..{limits.workers - 1}")
            placement[d, s] = workers
    return placement


def _is_whole(value: object, least: int, most: int) -> bool:
    """Whether a value is a whole number, not a boolean, from `least` to `most`."""
    return type(value) is int and least <= value <= most


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()
