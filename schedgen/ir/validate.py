"""JSON values to a header and instructions, every one of them checked.

Nothing that comes from a file is trusted: a number is compared with the
header's sizes before anything is built from it, and the header's sizes with
the number of instructions that were really there before memory is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.header import Header
from schedgen.ir.instructions import DIRECTIONS, KIND_NAME, KINDS, OPERANDS, VERSIONED, Instruction, Ints, Kind, Op
from schedgen.ir.limits import MOST_PAIRS, MOST_RATIO, MOST_TIES, MOST_USES
from schedgen.ir.stage_graph import StageGraph, check_edges
from schedgen.ir.tensor_parallel import TensorParallel, check_workers
from schedgen.util.errors import UsageError, clip

LIMIT = 2**31 - 1  # any number in a file fits an int32
KEYS = ("generator", "scheme", "order", "lowering", "edges", "tied", "owners", "groups", "weights", "compute")
TENSOR = "tensor"
OPTIONAL = ("apart", "shards", TENSOR)

_KIND = {name: kind for kind, name in KIND_NAME.items()}
# How many numbers follow the kind in a buffer's name.
_PARTS = {Kind.X: (2, 3), Kind.G: (2, 3), Kind.W: (1,), Kind.DW: (1,), Kind.T: (1,)}


class Wrong(Exception):
    """Something wrong with the header's entry `key`."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class Bounds(NamedTuple):
    """The sizes that bound every number in a file."""

    workers: int
    stages: int
    microbatches: int
    groups: int
    ties: int
    versions: int  # 0: weights have none
    parts: tuple[int, ...] = ()  # of the weights of each stage; empty: none are divided

    def divided(self, stage: object) -> bool:
        """Whether the weights of a stage have parts; False for what is no stage."""
        return isinstance(stage, int) and 0 <= stage < len(self.parts) and self.parts[stage] > 1


def instruction(item: object, bounds: Bounds) -> Instruction:
    """One instruction from its JSON object; ValueError says what is wrong with it."""
    if not isinstance(item, dict) or not isinstance(item.get("op"), str) or item["op"] not in Op.__members__:
        raise ValueError("no such instruction")
    op = Op[item["op"]]
    operands = (*OPERANDS[op], *["version"] * (bounds.versions > 0 and op in VERSIONED))
    if not bounds.divided(item.get("stage")):
        operands = tuple(name for name in operands if name != "shard")
    if set(item) != {"op", *operands}:
        raise ValueError(f"{op.name} takes {', '.join(operands)}")
    kind, stage, mb, via, peer = int(Kind.NONE), -1, -1, -1, -1
    for operand in operands:
        value = item[operand]
        if operand == "buf":
            kind, stage, mb, via, peer = _buffer(op, value, bounds, peer)
        elif operand == "stage":
            stage = _number(value, operand, bounds.stages)
        elif operand == "shard":
            via = _number(value, operand, bounds.parts[stage])
        elif operand == "mb":
            mb = _number(value, operand, bounds.microbatches)
        elif operand == "version":
            peer = _number(value, operand, bounds.versions)
        else:
            peer = _number(value, operand, bounds.groups if operand == "group" else bounds.workers)
    if op == Op.FETCH_W:
        kind = int(Kind.W)
    return Instruction(int(op), kind, stage, mb, via, peer)


def _number(value: object, what: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{what} must be a number in 0..{limit - 1}, not {_said(value)}")
    return value


def _buffer(op: Op, value: object, bounds: Bounds, peer: int) -> tuple[int, int, int, int, int]:
    """Kind, stage, microbatch, consumer; and the version, or `peer` where there is none."""
    form = r"(x|g|w|dw|t)((?:\.(?:0|[1-9][0-9]{0,9})){1,3})(?:@(0|[1-9][0-9]{0,9}))?(?:/(0|[1-9][0-9]{0,9}))?"
    match = re.fullmatch(form, value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"no buffer is called {_said(value)}")
    kind, numbers = _KIND[match[1]], [int(part) for part in match[2].split(".")[1:]]
    if len(numbers) not in _PARTS[kind] or kind not in KINDS[op]:
        raise ValueError(f"{op.name} takes no buffer {value}")
    if kind == Kind.T and numbers[0] >= bounds.ties:
        raise ValueError(f"{value}: tied has no entry {numbers[0]}")
    if (match[3] is not None) != (kind == Kind.W and bounds.versions > 0):
        raise ValueError(f"{value}: {'weights have a version here' if match[3] is None else 'it has no version'}")
    if match[3] is not None:
        if op != Op.FREE:
            raise ValueError(f"{op.name} takes no buffer {value}: weights that have versions do not travel")
        peer = _number(int(match[3]), f"{value}: version", bounds.versions)
    bounded = numbers if kind != Kind.T else []
    for what, number, limit in zip(
        ("stage", "microbatch", "consumer"), bounded, (bounds.stages, bounds.microbatches, bounds.stages), strict=False
    ):
        if number >= limit:
            raise ValueError(f"{value}: {what} {number} is not in 0..{limit - 1}")
    stage, mb, via = [*numbers, -1, -1][:3]
    divided = kind in (Kind.W, Kind.DW) and bounds.divided(stage)
    if (match[4] is not None) != divided:
        raise ValueError(f"{value}: {'the weights of this stage have parts' if divided else 'it has no parts'}")
    if match[4] is not None:
        via = _number(int(match[4]), f"{value}: shard", bounds.parts[stage])
    return int(kind), stage, mb, via, peer


def read_bounds(raw: Mapping[str, Any]) -> Bounds:
    scheme = raw.get("scheme")
    if not isinstance(scheme, dict) or not isinstance(scheme.get("name"), str):
        raise Wrong("scheme", "scheme must be an object with a name")
    values = []
    for key in ("workers", "stages", "microbatches"):
        value = scheme.get(key)
        if type(value) is not int or not 1 <= value <= LIMIT:
            raise Wrong("scheme", f"scheme: {key} must be a whole number from 1 to {LIMIT}")
        values.append(value)
    for text in (*scheme, *scheme.values()):
        by_stage = isinstance(text, list) and scheme["stages"] in _counts(raw, len(text))
        if by_stage and all(type(one) is int and 1 <= one <= LIMIT for one in text):
            continue
        if type(text) is not int and not _printable(text):
            raise Wrong("scheme", "scheme: values must be numbers, printable strings or lists of a number a stage")
    groups = raw.get("groups")
    if not isinstance(groups, list):
        raise Wrong("groups", "groups must be a list of lists of ranks")
    values.append(len(groups))
    tied = raw.get("tied")
    if not isinstance(tied, list):
        raise Wrong("tied", "tied must be a list of lists of stages")
    values.append(len(tied))
    lowering = raw.get("lowering")
    versions = isinstance(lowering, dict) and "updates" in lowering
    values.append(values[2] + 1 if versions else 0)
    parts = _parts(raw["shards"], values[0], values[1]) if "shards" in raw else ()
    sizes = (values[0], values[1], values[2], values[3], values[4], values[5])
    return Bounds(*sizes, parts)


def _parts(value: object, workers: int, stages: int) -> tuple[int, ...]:
    """How many parts the weights of each stage have."""
    if not isinstance(value, list) or len(value) != stages or not all(isinstance(ranks, list) for ranks in value):
        raise Wrong("shards", f"shards must be a list of {stages} lists of ranks")
    if not all(ranks and all(type(rank) is int and 0 <= rank < workers for rank in ranks) for ranks in value):
        raise Wrong("shards", f"shards must name an owner in 0..{workers - 1} of every part of every stage")
    counts = tuple(len(ranks) for ranks in value)
    if max(counts) == 1:
        raise Wrong("shards", "shards must divide a stage, or not be there")
    return counts


def _counts(raw: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """The stages a file has where a list has a number for each stage of the scheme, of the model, or of the file."""
    degree = raw[TENSOR].get("degree") if isinstance(raw.get(TENSOR), dict) else 1
    parts = raw["scheme"].get("parts", 1)
    return tuple(
        length * degree * one for one in (1, parts) if type(degree) is int and type(one) is int and 1 <= one <= LIMIT
    )


def _tensor(raw: Mapping[str, Any], bounds: Bounds) -> tuple[int, tuple[int, ...]]:
    """Shards of each stage, and the stages of the model that are whole."""
    if TENSOR not in raw:
        return 1, ()
    value = raw[TENSOR]
    if not isinstance(value, dict) or set(value) != {"degree", "whole"}:
        raise Wrong(TENSOR, "tensor must have degree and whole")
    degree, stages = value["degree"], value["whole"]
    if type(degree) is not int or not 2 <= degree <= bounds.stages or bounds.stages % degree:
        raise Wrong(TENSOR, f"tensor: degree must be at least 2 and divide the {bounds.stages} stages")
    (whole,) = _lists(TENSOR, [stages], "stages", bounds.stages // degree)
    if whole[-1] != bounds.stages // degree - 1:
        raise Wrong(TENSOR, "tensor: the last stage, which ends in the loss, must be whole")
    if bounds.versions:
        raise Wrong(TENSOR, "tensor: weights that have versions have no shards")
    return degree, whole


def header(raw: Mapping[str, Any], bounds: Bounds, jobs: int) -> Header:
    """The header; `jobs`, the number of instructions, bounds the memory it may take."""
    order = raw.get("order")
    if not isinstance(order, dict) or set(order) != {"mode", "n", "cost"} or not _printable(order["n"]):
        raise Wrong("order", "order must have mode, n and cost")
    if order["mode"] not in ("greedy", "strict"):
        raise Wrong("order", "order: mode must be greedy or strict")
    cost = order["cost"]
    if not isinstance(cost, dict) or tuple(cost) not in DIRECTIONS.values():
        raise Wrong("order", "order: cost must have F and B, or F, I and W")
    if not all(type(value) in (int, float) and 1e-12 < value < 1e12 for value in cost.values()):
        raise Wrong("order", "order: costs must be numbers from 1e-12 to 1e12")
    if max(cost.values()) > MOST_RATIO * min(cost.values()):
        raise Wrong("order", "order: the largest cost may be a million times the smallest, not more")
    shape = (len(cost), bounds.stages, bounds.microbatches)
    if shape[0] * shape[1] * shape[2] > jobs or bounds.workers > jobs or bounds.workers * bounds.stages > MOST_PAIRS:
        raise Wrong("scheme", f"the sizes ask for more jobs or workers than {jobs} instructions can be for")
    if bounds.workers * sum(bounds.parts) > MOST_PAIRS or sum(bounds.parts) > jobs:  # every part has a STEP
        raise Wrong("shards", f"shards ask for more parts than {jobs} instructions can be for")
    generator = raw.get("generator")
    if not isinstance(generator, str) or not _printable(generator):
        raise Wrong("generator", "generator must be a printable string")
    degree, whole = _tensor(raw, bounds)
    edges = _edges(raw.get("edges"), bounds, degree)
    if len(edges) * bounds.microbatches > jobs:  # each has a gradient, which somebody frees
        raise Wrong("edges", f"edges ask for more gradients than {jobs} instructions can be for")
    found = Header(
        scheme=raw["scheme"],
        mode=order["mode"],
        n=order["n"],
        cost=cost,
        lowering=_lowering(raw.get("lowering"), bounds),
        graph=StageGraph(bounds.stages, edges, _apart(raw, edges, bounds)),
        tied=_tied(raw.get("tied"), bounds),
        groups=_rank_lists("groups", raw.get("groups"), bounds),
        compute=_placement(raw, "compute", shape, bounds),
        weights=_placement(raw, "weights", shape, bounds),
        generator=generator,
        part_owners=tuple(map(tuple, raw.get("shards", ()))),
        tensor_parallel=TensorParallel(degree, whole, bounds.stages),
    )
    for stage, ranks in enumerate(found.part_owners):
        if (found.weights[:, stage] != ranks[0]).any():
            raise Wrong("shards", f"shards: the first owner of stage {stage} is not the worker that weights names")
    if found.part_uses() > MOST_USES * jobs:
        raise Wrong("shards", f"shards ask for more parts of weights than {jobs} instructions can use")
    if found.part_owners and (found.tied or found.weight_versions or degree > 1):
        raise Wrong("shards", "shards: weights that are tied, have versions, or are of shards, have no parts")
    if degree > 1:
        try:
            check_workers(found.compute, degree, found.directions)
        except UsageError as error:
            raise Wrong("compute", str(error)) from None
        if found.tensor_parallel.split[list(found.graph.per_consumer)].any():
            raise Wrong("apart", "apart: what a split stage gives is one sum")
    if _rank_lists("owners", raw.get("owners"), bounds) != found.owners:
        raise Wrong("owners", "owners do not agree with weights")
    if set(raw) - {"schedgen", "programs", "sha256", *OPTIONAL} != set(KEYS):
        raise Wrong("schedgen", f"the header must have exactly {', '.join(KEYS)}")
    return found


def _lowering(value: object, bounds: Bounds) -> dict[str, int | list[int] | str]:
    least = {"weight_slots": 1, "fan_out": 1, "prefetch": 0}
    if not isinstance(value, dict) or set(value) - {"updates"} != {*least, "recompute"}:
        raise Wrong("lowering", f"lowering must have {', '.join(least)} and recompute")
    if "updates" in value and value["updates"] not in ("stash", "vertical"):
        raise Wrong("lowering", "lowering: updates must be stash or vertical, or not be there")
    for key, low in least.items():
        if type(value[key]) is not int or not low <= value[key] <= LIMIT:
            raise Wrong("lowering", f"lowering: {key} must be a whole number of at least {low}")
    stages = value["recompute"]
    if not isinstance(stages, list) or not all(type(s) is int and 0 <= s < bounds.stages for s in stages):
        raise Wrong("lowering", "lowering: recompute must be a list of stages")
    return value


def _edges(value: object, bounds: Bounds, degree: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(end) is int and abs(end) <= LIMIT for end in pair)
        for pair in value
    ):
        raise Wrong("edges", "edges must be a list of pairs of stages")
    try:
        return check_edges(value, bounds.stages, degree)
    except UsageError as error:
        raise Wrong("edges", str(error)) from None


def _apart(raw: Mapping[str, Any], edges: tuple[tuple[int, int], ...], bounds: Bounds) -> tuple[int, ...]:
    if "apart" not in raw:
        return ()
    (stages,) = _lists("apart", [raw["apart"]], "stages", bounds.stages)
    several = {stage for stage, count in Counter(producer for producer, _ in edges).items() if count > 1}
    if not several.issuperset(stages):
        raise Wrong("apart", "apart must name stages that several stages read")
    return stages


def _tied(value: object, bounds: Bounds) -> tuple[tuple[int, ...], ...]:
    """Ties are known by their place (t.k): they are refused, not sorted."""
    ties = _lists("tied", value, "stages", bounds.stages)
    if any(len(stages) < 2 for stages in ties) or list(ties) != sorted(set(ties)):
        raise Wrong("tied", "tied must have two stages or more in each list, and different lists, ascending")
    if np.bincount([stage for stages in ties for stage in stages], minlength=1).max() > MOST_TIES:
        raise Wrong("tied", f"tied must have no stage in more than {MOST_TIES} lists")
    return ties


def _rank_lists(key: str, value: object, bounds: Bounds) -> tuple[tuple[int, ...], ...]:
    return _lists(key, value, "ranks", bounds.workers)


def _lists(key: str, value: object, what: str, limit: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise Wrong(key, f"{key} must be a list of lists of {what}")
    for numbers in value:
        if (
            not isinstance(numbers, list)
            or not numbers
            or not all(type(number) is int and 0 <= number < limit for number in numbers)
            or numbers != sorted(set(numbers))
        ):
            raise Wrong(key, f"{key} must be lists of different {what} in 0..{limit - 1}, ascending")
    return tuple(map(tuple, value))


def _placement(raw: Mapping[str, Any], key: str, shape: tuple[int, int, int], bounds: Bounds) -> Ints:
    value = raw.get(key)
    names = DIRECTIONS[shape[0]]
    if not isinstance(value, dict) or names[0] not in value or not set(value) <= set(names):
        raise Wrong(key, f"{key} must have {names[0]} and may have {', '.join(names[1:])}")
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
            if len(workers) not in (1, shape[2]) or (isinstance(row, list) and len(row) != shape[2]):
                raise Wrong(key, f"{key} {name}: stage {s} must be a worker or a list of {shape[2]}")
            if not all(type(worker) is int and 0 <= worker < bounds.workers for worker in workers):
                raise Wrong(key, f"{key} {name}: stage {s} names a worker outside 0..{bounds.workers - 1}")
            placement[d, s] = workers
    return placement


def _printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _said(value: object) -> str:
    """A value of the file, short; what holds others may hold more of them in one another than repr takes."""
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else clip(repr(value))
