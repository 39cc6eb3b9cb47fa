"""Read an instruction from its JSON object; check that operands fit the opcode and numbers are below their limits."""

from __future__ import annotations

import re

from schedgen.ir.instructions import KIND_NAME, KINDS, OPERANDS, Instruction, Kind, Op
from schedgen.ir.limits import Limits
from schedgen.util.errors import clip

_KIND = {name: kind for kind, name in KIND_NAME.items()}
_BUFFER = re.compile(
    r"(x|g|w|dw|t)((?:\.(?:0|[1-9][0-9]{0,9})){1,3})(?:@(0|[1-9][0-9]{0,9}))?(?:/(0|[1-9][0-9]{0,9}))?"
)
# How many numbers may follow the kind in a buffer's name.
NAME_NUMBERS = {Kind.X: (2, 3), Kind.G: (2, 3), Kind.W: (1,), Kind.DW: (1,), Kind.T: (1,)}


def instruction(item: object, limits: Limits) -> Instruction:
    """One instruction from its JSON object; ValueError says what is wrong with it."""
    if not isinstance(item, dict) or not isinstance(item.get("op"), str) or item["op"] not in Op.__members__:
        raise ValueError("no such instruction")
    op = Op[item["op"]]
    there = {"shard": limits.is_sharded(item.get("stage")), "version": limits.versions > 0}
    operands = [name for name in OPERANDS[op] if there.get(name, True)]
    if set(item) != {"op", *operands}:
        raise ValueError(f"{op.name} takes {', '.join(operands)}")
    kind, stage, mb, piece, operand = int(Kind.W if op == Op.FETCH_W else Kind.NONE), -1, -1, -1, -1
    for name in operands:
        value = item[name]
        if name == "buf":
            kind, stage, mb, piece, operand = _buffer(op, value, limits)
        elif name == "stage":
            stage = _number(value, name, limits.stages)
        elif name == "shard":
            piece = _number(value, name, limits.shards[stage])
        elif name == "mb":
            mb = _number(value, name, limits.microbatches)
        elif name == "version":
            operand = _number(value, name, limits.versions)
        else:
            operand = _number(value, name, limits.groups if name == "group" else limits.workers)
    return Instruction(int(op), kind, stage, mb, piece, operand)


def _number(value: object, what: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{what} must be a number in 0..{limit - 1}, not {_quoted(value)}")
    return value


def _buffer(op: Op, value: object, limits: Limits) -> tuple[int, int, int, int, int]:
    """Kind, stage, microbatch, consumer or shard, and version of a buffer by its name; -1 for what it lacks."""
    match = _BUFFER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"no buffer is called {_quoted(value)}")
    kind, numbers = _KIND[match[1]], [int(part) for part in match[2].split(".")[1:]]
    if len(numbers) not in NAME_NUMBERS[kind] or kind not in KINDS[op]:
        raise ValueError(f"{op.name} takes no buffer {value}")
    if kind == Kind.T and numbers[0] >= limits.ties:
        raise ValueError(f"{value}: tied has no entry {numbers[0]}")
    if (match[3] is not None) != (kind == Kind.W and limits.versions > 0):
        raise ValueError(f"{value}: {'its version is missing' if match[3] is None else 'it has no version'}")
    version = -1
    if match[3] is not None:
        if op != Op.FREE:
            raise ValueError(f"{op.name} takes no buffer {value}: weights that have versions are never sent")
        version = _number(int(match[3]), f"{value}: version", limits.versions)
    bounded = numbers if kind != Kind.T else []
    for what, number, limit in zip(
        ("stage", "microbatch", "consumer"), bounded, (limits.stages, limits.microbatches, limits.stages), strict=False
    ):
        if number >= limit:
            raise ValueError(f"{value}: {what} {number} is not in 0..{limit - 1}")
    stage, mb, piece = [*numbers, -1, -1][:3]
    divided = kind in (Kind.W, Kind.DW) and limits.is_sharded(stage)
    if (match[4] is not None) != divided:
        raise ValueError(
            f"{value}: {'the weights of this stage are divided: name a shard' if divided else 'it has no shards'}"
        )
    if match[4] is not None:
        piece = _number(int(match[4]), f"{value}: shard", limits.shards[stage])
    return int(kind), stage, mb, piece, version


def _quoted(value: object) -> str:
    """A value of the file, short; lists and objects may be nested deeper than repr can go."""
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else clip(repr(value))
