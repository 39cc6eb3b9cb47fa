"""Read the header from its JSON object, and check every value.

A number is compared with the header's sizes before anything is built from it, and the sizes with the number of
instructions in the file before memory is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from schedgen.ir.cost import REDO, durations, is_amount
from schedgen.ir.header import Header, owners_of
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.limits import Limits, check_workers
from schedgen.ir.stage_graph import StageGraph, check_edges, check_per_consumer
from schedgen.ir.tensor_parallel import TensorParallel, check_slices_apart
from schedgen.ir.weights import STASH, TWO_BUFFERS, VERTICAL
from schedgen.util.arrays import Ints
from schedgen.util.errors import UsageError, clip

LARGEST = 2**31 - 1  # any number in a file fits an int32
KEYS = ("generator", "scheme", "order", "lowering", "edges", "tied", "owners", "groups", "weights", "compute")
OPTIONAL_KEYS = ("per_consumer", "shards", "parts", "tensor")

# The least value of each number of the lowering.
_LEAST = {"weight_slots": 1, "fan_out": 1, "prefetch": 0, "memory_limit": 1, "accumulated": 1}
_ARE_TRUE = ("offload_optimizer", "evict")  # or left out
_OPTIONAL_LOWERING = ("memory_limit", "updates", "accumulated", "transport", "sums", *_ARE_TRUE, "offload")
_LOWERING = ("weight_slots", "fan_out", "prefetch", "recompute", *_OPTIONAL_LOWERING)  # in this order

_Checked = TypeVar("_Checked")


class Wrong(Exception):
    """The header's entry `key` is wrong."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


def _need(condition: object, key: str, reason: str) -> None:
    """Wrong unless the condition holds; `reason` is a sentence that names the entry."""
    if not condition:
        raise Wrong(key, reason)


def _accepted(key: str, check: Callable[..., _Checked], *arguments: Any) -> _Checked:
    """What a check of users' values returns; what it raises becomes Wrong."""
    try:
        return check(*arguments)
    except UsageError as error:
        raise Wrong(key, str(error)) from None
    except TypeError:
        raise Wrong(key, f"{key} must be a list") from None


def read_limits(raw: Mapping[str, Any]) -> Limits:
    """The limits that a header sets; Wrong if one is missing or wrong."""
    scheme: Any = raw.get("scheme")
    lowering, shards = raw.get("lowering"), raw.get("shards", [])
    _need(isinstance(scheme, dict) and isinstance(scheme.get("name"), str), "scheme", "scheme must have a name")
    for key in ("workers", "stages", "microbatches"):
        right = _is_whole(scheme.get(key), 1, LARGEST)
        _need(right, "scheme", f"scheme: {key} must be a whole number from 1 to {LARGEST}")
    for value in (*scheme, *scheme.values()):
        numbers = value if isinstance(value, list) else [value]
        right = _is_printable(value) or all(_is_whole(number, -LARGEST, LARGEST) for number in numbers)
        _need(right, "scheme", "scheme: values must be whole numbers, lists of them, or printable strings")
    workers, stages, microbatches = scheme["workers"], scheme["stages"], scheme["microbatches"]
    for key, what in (("groups", "ranks"), ("tied", "stages")):
        _need(isinstance(raw.get(key), list), key, f"{key} must be a list of lists of {what}")
    versions = microbatches + 1 if isinstance(lowering, dict) and "updates" in lowering else 0
    if "shards" in raw:
        right = isinstance(shards, list) and len(shards) == stages and all(isinstance(ranks, list) for ranks in shards)
        _need(right, "shards", f"shards must be a list of {stages} lists of ranks")
        right = all(ranks and all(_is_whole(rank, 0, workers - 1) for rank in ranks) for ranks in shards)
        _need(right, "shards", f"shards must name an owner in 0..{workers - 1} of every shard of every stage")
        _need(max(map(len, shards)) > 1, "shards", "shards must divide a stage, or be left out")
    parts = raw.get("parts", [])
    if "parts" in raw:
        right = isinstance(parts, list) and len(parts) == stages and all(_is_whole(n, 1, LARGEST) for n in parts)
        _need(right and max(parts) > 1, "parts", f"parts must be {stages} numbers of at least 1, not all 1")
        _accepted("parts", check_workers, workers, sum(parts), "parts of gradients")
    return Limits(
        workers, stages, microbatches, len(raw["groups"]), len(raw["tied"]), versions, tuple(map(len, shards)),
        tuple(parts),
    )  # fmt: skip


def read_header(raw: Mapping[str, Any], limits: Limits, jobs: int) -> Header:
    """The header; `jobs`, the number of instructions, limits the memory it takes. Wrong names the entry at fault."""
    keys = set(raw) - {"schedgen", "programs", "sha256", *OPTIONAL_KEYS}
    _need(keys == set(KEYS), "schedgen", f"the header must have exactly {', '.join(KEYS)}")
    order = raw["order"]
    _check_order(order)
    shape = (len(set(order["cost"]) - {REDO}), limits.stages, limits.microbatches)
    least = shape[0] * shape[1] * shape[2]
    _need(least <= jobs, "scheme", f"the sizes ask for more jobs than {jobs} instructions can serve")
    _need(_is_printable(raw["generator"]), "generator", "generator must be a printable string")
    tensor_parallel = _tensor_parallel(raw.get("tensor"), limits)
    edges = _accepted("edges", check_edges, raw["edges"], limits.stages, tensor_parallel.degree)
    per_consumer = _accepted("per_consumer", check_per_consumer, raw.get("per_consumer", []), edges)
    directions, named = shape[0], raw["weights"]
    if directions == 1 and isinstance(named, dict):  # a list of forwards may name the owners of training
        directions = next(d for d in (1, 2, 3) if d == 3 or set(named) <= set(DIRECTIONS[d]))
    header = Header(
        scheme=raw["scheme"],
        mode=order["mode"],
        n=order["n"],
        cost=order["cost"],
        lowering=_lowering(raw["lowering"], limits),
        graph=StageGraph(limits.stages, edges, per_consumer),
        tied=_lists("tied", raw["tied"], "stages", limits.stages),
        groups=_lists("groups", raw["groups"], "ranks", limits.workers),
        compute=_placement(raw, "compute", shape, limits),
        weights=_placement(raw, "weights", (directions, *shape[1:]), limits),
        generator=raw["generator"],
        shard_owners=tuple(map(tuple, raw.get("shards", ()))),
        tensor_parallel=tensor_parallel,
        parts=tuple(raw.get("parts", ())),
    )
    _check_together(header)
    right = _lists("owners", raw["owners"], "ranks", limits.workers) == header.owners
    _need(right, "owners", "owners do not agree with weights")
    return header


def _check_order(order: Any) -> None:
    right = isinstance(order, dict) and set(order) == {"mode", "n", "cost"} and _is_printable(order["n"])
    _need(right, "order", "order must have mode, n and cost")
    _need(order["mode"] in ("greedy", "strict"), "order", "order: mode must be greedy or strict")
    cost = order["cost"]
    names = tuple(name for name in cost if name != REDO) if isinstance(cost, dict) else ()
    words = "order: cost must have F and B, or F, I and W, or F of forwards alone; and may have R"
    _need(names in DIRECTIONS.values() and all(map(is_amount, cost.values())), "order", words)
    _accepted("order", durations, cost, len(names))


def _tensor_parallel(value: Any, limits: Limits) -> TensorParallel:
    if value is None:
        return TensorParallel(1, (), limits.stages)
    right = isinstance(value, dict) and set(value) == {"degree", "replicated"}
    _need(right, "tensor", "tensor must have degree and replicated")
    degree = value["degree"]
    right = _is_whole(degree, 2, limits.stages) and limits.stages % degree == 0
    _need(right, "tensor", f"tensor: degree must be at least 2 and divide the {limits.stages} stages")
    last = limits.stages // degree - 1
    (replicated,) = _lists("tensor", [value["replicated"]], "stages", last + 1)
    _need(replicated[-1] == last, "tensor", "tensor: the last stage, which ends in the loss, must be replicated")
    _need(not limits.versions, "tensor", "tensor: weights that have versions have no slices")
    return TensorParallel(degree, replicated, limits.stages)


def _check_together(header: Header) -> None:
    layers, owners, tensor = header.scheme.get("layers"), header.shard_owners, header.tensor_parallel
    right = layers is None or (isinstance(layers, list) and len(layers) == header.model_stages and min(layers) > 0)
    _need(right, "scheme", "scheme: layers must be a list of a number for each stage of the model")
    right = all(len(tie) > 1 for tie in header.tied) and list(header.tied) == sorted(set(header.tied))
    _need(right, "tied", "tied must have two stages or more in each list, and different lists, ascending")
    if len(set(header.groups)) < len(header.groups):  # collectives name them by position
        ((ranks, count),) = Counter(header.groups).most_common(1)
        raise Wrong("groups", f"groups must be different, but {clip(str(list(ranks)))} is listed {count} times")
    right = all((header.weights[:, stage] == ranks[0]).all() for stage, ranks in enumerate(owners))
    _need(right, "shards", "shards: the first owner of each stage must be the worker that weights names")
    right = not owners or (header.has_flush and not header.stepped_together)
    words = "shards: weights that are tied, have versions or belong to tensor slices are not divided"
    _need(right, "shards", words)
    right = not header.sums_by_messages or (header.has_flush and not (header.stepped_together or owners))
    words = "lowering: sums of weights that are tied, divided, have versions or belong to tensor slices are ALLREDUCEs"
    _need(right, "lowering", words)
    has_parts = [several or count == 1 for several, count in zip(header.several_owners, header.parts, strict=False)]
    right = not header.offloads_optimizer or (header.has_flush and not header.is_forward)
    _need(right, "lowering", "lowering: offload_optimizer needs one STEP for each weight, at the end")
    right = not header.parts or (header.sums_by_messages and all(has_parts))
    _need(right, "parts", "parts: only what several owners of a stage sum by messages has parts")
    if tensor:
        _accepted("compute", check_slices_apart, header.compute, tensor.degree, header.directions)
        right = not tensor.sliced[list(header.graph.per_consumer)].any()
        _need(right, "per_consumer", "per_consumer: the output of a sliced stage is one sum, for all consumers alike")
    if header.is_forward:
        _need(not header.sums_by_messages, "lowering", "lowering: a list of forwards sums no gradients")
        _need(not header.tied, "tied", "tied: a list of forwards sums no gradients, so it has no ties")
        saves = header.lowering["recompute"] or {"memory_limit", "offload", "evict"} & {*header.lowering}
        right = header.has_flush and not saves
        words = "lowering: a list of forwards redoes nothing, saves nothing and makes no versions of weights"
        _need(right, "lowering", words)
        right = len(header.weights) == 1 or owners_of(header.weights) != owners_of(header.weights[:1])
        _need(right, "weights", "weights: a list of forwards should have F alone, as F names all owners")


def _lowering(value: Any, limits: Limits) -> dict[str, Any]:
    if not isinstance(value, dict) or {*value, *_OPTIONAL_LOWERING} != set(_LOWERING):
        needed = ", ".join(key for key in _LOWERING if key not in _OPTIONAL_LOWERING)
        raise Wrong("lowering", f"lowering must have {needed}, and may have {', '.join(_OPTIONAL_LOWERING)}")
    right = value.get("updates", STASH) in (STASH, VERTICAL, TWO_BUFFERS)
    _need(right, "lowering", "lowering: updates must be stash, vertical or 2bw, or be left out")
    right = ("accumulated" in value) == (value.get("updates") == TWO_BUFFERS)
    _need(right, "lowering", "lowering: accumulated belongs to updates 2bw, and to no others")
    _need(_is_printable(value.get("transport", "")), "lowering", "lowering: transport must be a printable name")
    for key, least in _LEAST.items():
        right = key not in value or _is_whole(value[key], least, LARGEST)
        _need(right, "lowering", f"lowering: {key} must be a whole number of at least {least}")
    _need(_is_printable(value.get("sums", "")), "lowering", "lowering: sums must be a printable string")
    for key in _ARE_TRUE:
        _need(value.get(key, True) is True, "lowering", f"lowering: {key} must be true, or be left out")
    for key in {"recompute", "offload"} & {*value}:
        for forwards in value[key] if isinstance(value[key], list) else [None]:
            stage, mb = forwards if isinstance(forwards, list) and len(forwards) == 2 else (forwards, 0)
            right = _is_whole(stage, 0, limits.stages - 1) and _is_whole(mb, 0, limits.microbatches - 1)
            words = f"lowering: {key} must be a list of stages, or pairs of a stage and a microbatch"
            _need(right, "lowering", words)
    return {key: value[key] for key in _LOWERING if key in value}


def _lists(key: str, value: Any, what: str, limit: int) -> tuple[tuple[int, ...], ...]:
    """Lists of stages or ranks below `limit`, each ascending and not empty."""
    lists: list[Any] = value if isinstance(value, list) else [None]
    for numbers in lists:
        right = isinstance(numbers, list) and numbers and all(_is_whole(number, 0, limit - 1) for number in numbers)
        right = right and numbers == sorted(set(numbers))
        _need(right, key, f"{key} must be lists of different {what} in 0..{limit - 1}, ascending")
    return tuple(map(tuple, value))


def _placement(raw: Mapping[str, Any], key: str, shape: tuple[int, int, int], limits: Limits) -> Ints:
    """The workers of all jobs, of `shape` (directions, stages, microbatches)."""
    value, names = raw[key], DIRECTIONS[shape[0]]
    more = f" and may have {', '.join(names[1:])}" if names[1:] else " alone"
    right = isinstance(value, dict) and names[0] in value and set(value) <= set(names)
    _need(right, key, f"{key} must have {names[0]}{more}")
    placement = np.empty(shape, np.int32)
    for d, name in enumerate(names):
        if name not in value:
            placement[d] = placement[d - 1]
            continue
        right = isinstance(value[name], list) and len(value[name]) == shape[1]
        _need(right, key, f"{key} {name} must list {shape[1]} stages")
        for s, row in enumerate(value[name]):
            workers = row if isinstance(row, list) and len(row) == shape[2] else [row]
            right = all(_is_whole(worker, 0, limits.workers - 1) for worker in workers)
            words = f"a worker in 0..{limits.workers - 1}, or a list of {shape[2]}"
            _need(right, key, f"{key} {name}: stage {s} must be {words}")
            placement[d, s] = workers
    return placement


def _is_whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()
