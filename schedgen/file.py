"""The schedule file: canonical JSON, one instruction a line, in and out.

Same program, same bytes. The header comes first, then every rank's list, then
a SHA-256 of all lines above it (last, so that a file is written in one pass
and a file cut short is noticed). Reading accepts exactly what writing makes
and refuses anything else with its line; `parse` is the lenient reader that
`schedgen seal` uses on files edited by hand. Every number read is checked
against the header's sizes before anything is built from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from schedgen.errors import RefusedFile, UsageError
from schedgen.graph import check_edges
from schedgen.program import DIRECTIONS, KIND_NAME, KINDS, OPERANDS, Header, Instruction, Ints, Kind, Op, Program, Rows

VERSION = 1
LIMIT = 2**31 - 1  # any number in a file fits an int32

_PROGRAMS = ' "programs": ['
_KIND = {name: kind for kind, name in KIND_NAME.items()}
# How many numbers follow the kind in a buffer's name.
_PARTS = {Kind.X: (2,), Kind.G: (2, 3), Kind.W: (1,), Kind.DW: (1,)}
_KEYS = ("generator", "scheme", "order", "weight_slots", "edges", "owners", "groups", "weights", "compute")


# Writing


def write(program: Program, out: BinaryIO) -> None:
    """Write a projected program as one canonical file."""
    digest = hashlib.sha256()
    for line in _body(program):
        data = line.encode("ascii") + b"\n"
        digest.update(data)
        out.write(data)
    out.write(f' "sha256": "{digest.hexdigest()}"\n}}\n'.encode("ascii"))


def _body(program: Program) -> Iterator[str]:
    yield from header_lines(program.header)
    workers = program.header.workers
    texts: dict[Instruction, str] = {}
    for rank in range(workers):
        yield "  ["
        last = ""
        for instruction in program.instructions(rank):
            if last:
                yield last + ","
            if (text := texts.get(instruction)) is None:
                text = texts[instruction] = f"   {instruction}"
            last = text
        if last:
            yield last
        yield "  ]," if rank + 1 < workers else "  ]"
    yield " ],"


def header_lines(header: Header) -> list[str]:
    """The lines before the first rank's list."""
    values: list[Any] = [
        header.generator,
        dict(header.scheme),
        {"mode": header.mode, "n": header.n, "cost": dict(header.cost)},
        header.weight_slots,
        header.edges,
        header.owners,
        header.groups,
    ]
    lines = [f'{{"schedgen": {VERSION},']
    lines += [f' "{key}": {json.dumps(value)},' for key, value in zip(_KEYS, values, strict=False)]
    for key, placement in (("weights", header.weights), ("compute", header.compute)):
        lines += _placement_lines(key, placement)
    return [*lines, _PROGRAMS]


def _placement_lines(key: str, placement: Ints) -> list[str]:
    """One stage a line: its worker, or one by microbatch. A direction equal to the one before is left out."""
    lines = [f' "{key}": {{']
    for d, name in enumerate(DIRECTIONS[len(placement)]):
        if d and (placement[d] == placement[d - 1]).all():
            continue
        if d:
            lines[-1] += ","
        rows = [int(row[0]) if (row == row[0]).all() else row.tolist() for row in placement[d]]
        lines += [f'  "{name}": [', *(f"   {row}," for row in rows[:-1]), f"   {rows[-1]}", "  ]"]
    return [*lines, " },"]


def line_of(program: Program, row: int, rank: int | None = None) -> int:
    """The line (from 1) of a row of a projected program in its file; `rank` where the row is not its own."""
    rank = int(program.rows.rank[row]) if rank is None else rank
    return len(header_lines(program.header)) + 2 * rank + row + 2


# Reading


def read(source: BinaryIO, name: str) -> tuple[Program, str | None]:
    """The program in a canonical file, and what is wrong with its SHA-256 (None: nothing).

    Raises RefusedFile, naming the line, where a line is not what `write`
    writes. The hash is left to the caller, who can say more about a damaged
    instruction than that it is damaged.
    """
    lines = _Lines(source, name)
    header_text: list[str] = []
    first = next(lines)
    version = re.fullmatch(r'\{"schedgen": (\d{1,9}),', first)
    if version is None:
        raise lines.refuse('not a schedule file: it should begin with {"schedgen": 1,')
    if int(version[1]) > VERSION:
        raise lines.refuse(f"format version {version[1]} is newer than this schedgen reads ({VERSION})")
    if int(version[1]) < VERSION:
        raise lines.refuse(f"there is no format version {version[1]}")
    header_text.append(first)
    while header_text[-1] != _PROGRAMS:
        header_text.append(next(lines))
    try:
        raw = json.loads("\n".join(header_text) + "]}")
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", lines.number)
        raise RefusedFile(f"{name}:{line}: the header is not JSON: {getattr(error, 'msg', error)}") from None
    try:
        sizes = _sizes(raw)
        counts: list[int] = []
        numbers = np.concatenate([np.empty((0, 6), np.int32), *_programs(lines, sizes, counts)])
        header = _header(raw, sizes, jobs=len(numbers))
    except _Wrong as wrong:
        raise RefusedFile(f"{name}:{_key_line(header_text, wrong.key)}: {wrong}") from None
    for number, (got, expected) in enumerate(zip(header_text, header_lines(header), strict=False), start=1):
        if got != expected:
            raise RefusedFile(f"{name}:{number}: not in canonical form; `schedgen seal` rewrites it")
    program = Program(header, Rows(np.repeat(np.arange(sizes.workers, dtype=np.int32), counts), *numbers.T))
    digest = lines.digest.hexdigest()
    stored = re.fullmatch(r' "sha256": "([0-9a-f]{64})"', next(lines))
    if stored is None:
        raise lines.refuse("the SHA-256 of the lines above should stand here")
    fault = None
    if stored[1] != digest:
        fault = f"{name}:{lines.number}: the SHA-256 does not match the lines above: the file was damaged or edited"
    if next(lines) != "}" or not lines.ended():
        raise lines.refuse("the file should end with one line '}' here")
    return program, fault


def parse(text: str, name: str) -> Program:
    """The program in a file that may be edited by hand: any JSON layout, any or no hash."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedFile(f"{name}:{getattr(error, 'lineno', 1)}: not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(raw, dict) or raw.get("schedgen") != VERSION:
        raise RefusedFile(f'{name}: not a schedule file of format version {VERSION} ("schedgen": {VERSION})')
    try:
        sizes = _sizes(raw)
        programs = raw.get("programs")
        if not isinstance(programs, list) or len(programs) != sizes.workers:
            raise _Wrong("programs", f"programs must be a list of {sizes.workers} lists, one a worker")
        numbers: list[Instruction] = []
        for rank, listed in enumerate(programs):
            if not isinstance(listed, list):
                raise _Wrong("programs", f"the program of rank {rank} must be a list")
            for i, item in enumerate(listed):
                try:
                    numbers.append(_instruction(item, sizes))
                except ValueError as error:
                    raise _Wrong("programs", f"rank {rank}, instruction {i}: {error}") from None
        header = _header(raw, sizes, jobs=len(numbers))
    except _Wrong as wrong:
        raise RefusedFile(f"{name}: {wrong}") from None
    columns = np.array(numbers, np.int32).reshape(-1, 6).T
    ranks = np.repeat(np.arange(sizes.workers, dtype=np.int32), [len(listed) for listed in programs])
    return Program(header, Rows(ranks, *columns))


class _Wrong(Exception):
    """Something wrong with the header's entry `key`."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class _Sizes(NamedTuple):
    """The sizes that bound every number in a file."""

    workers: int
    stages: int
    microbatches: int
    groups: int


class _Lines:
    """A file's lines, hashed and counted as they are read."""

    def __init__(self, source: BinaryIO, name: str) -> None:
        self.source, self.name, self.number, self.digest = source, name, 0, hashlib.sha256()

    def __next__(self) -> str:
        data = self.source.readline()
        self.number += 1
        if not data.endswith(b"\n"):
            raise self.refuse("the file ends here, before its end" if not data else "the line is cut short")
        self.digest.update(data)
        try:
            return data[:-1].decode("ascii")
        except UnicodeDecodeError:
            raise self.refuse("not ASCII text") from None

    def ended(self) -> bool:
        return not self.source.read(1)

    def refuse(self, reason: str) -> RefusedFile:
        return RefusedFile(f"{self.name}:{self.number}: {reason}")


def _programs(lines: _Lines, sizes: _Sizes, counts: list[int]) -> Iterator[Ints]:
    """Every rank's instructions as an array (length, 6); fills `counts` with the lengths."""
    known: dict[str, Instruction] = {}
    for rank in range(sizes.workers):
        if next(lines) != "  [":
            raise lines.refuse(f"the program of rank {rank} should begin here, with '  ['")
        end = "  ]," if rank + 1 < sizes.workers else "  ]"
        found: list[Instruction] = []
        comma = True
        while (line := next(lines)) != end:
            if not comma:
                raise lines.refuse(f"rank {rank}: a comma is missing at the end of the line before, or this is its end")
            text, comma = (line[:-1], True) if line.endswith(",") else (line, False)
            instruction = known.get(text)
            if instruction is None:
                instruction = known[text] = _parse_line(lines, rank, text, sizes)
            found.append(instruction)
        if found and comma:
            raise lines.refuse(f"rank {rank}: the list ends here, but a comma stands before")
        counts.append(len(found))
        yield np.array(found, np.int32).reshape(-1, 6)
    if next(lines) != " ],":
        raise lines.refuse("the programs should end here, with ' ],'")


def _parse_line(lines: _Lines, rank: int, text: str, sizes: _Sizes) -> Instruction:
    try:
        instruction = _instruction(json.loads(text), sizes)
    except (ValueError, RecursionError) as error:
        reason = f"not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else str(error)
        raise lines.refuse(f"rank {rank}: {_clip(text)}: {reason}") from None
    if text != f"   {instruction}":
        raise lines.refuse(f"rank {rank}: {_clip(text)}: not in canonical form; `schedgen seal` rewrites it")
    return instruction


def _instruction(item: object, sizes: _Sizes) -> Instruction:
    """One instruction from its JSON object; ValueError says what is wrong with it."""
    if not isinstance(item, dict) or not isinstance(item.get("op"), str) or item["op"] not in Op.__members__:
        raise ValueError("no such instruction")
    op = Op[item["op"]]
    if set(item) != {"op", *OPERANDS[op]}:
        raise ValueError(f"{op.name} takes {', '.join(OPERANDS[op])}")
    kind, stage, mb, via, peer = int(Kind.NONE), -1, -1, -1, -1
    for operand in OPERANDS[op]:
        value = item[operand]
        if operand == "buf":
            kind, stage, mb, via = _buffer(op, value, sizes)
        elif operand == "stage":
            stage = _number(value, operand, sizes.stages)
        elif operand == "mb":
            mb = _number(value, operand, sizes.microbatches)
        else:
            peer = _number(value, operand, sizes.groups if operand == "group" else sizes.workers)
    if op == Op.FETCH_W:
        kind = int(Kind.W)
    return Instruction(int(op), kind, stage, mb, via, peer)


def _number(value: object, what: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{what} must be a number in 0..{limit - 1}, not {_clip(repr(value))}")
    return value


def _buffer(op: Op, value: object, sizes: _Sizes) -> tuple[int, int, int, int]:
    match = re.fullmatch(r"(x|g|w|dw)((?:\.(?:0|[1-9][0-9]{0,9})){1,3})", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"no buffer is called {_clip(repr(value))}")
    kind, numbers = _KIND[match[1]], [int(part) for part in match[2].split(".")[1:]]
    if len(numbers) not in _PARTS[kind] or kind not in KINDS[op]:
        raise ValueError(f"{op.name} takes no buffer {value}")
    for what, number, limit in zip(
        ("stage", "microbatch", "consumer"), numbers, (sizes.stages, sizes.microbatches, sizes.stages), strict=False
    ):
        if number >= limit:
            raise ValueError(f"{value}: {what} {number} is not in 0..{limit - 1}")
    stage, mb, via = [*numbers, -1, -1][:3]
    return int(kind), stage, mb, via


def _sizes(raw: Mapping[str, Any]) -> _Sizes:
    scheme = raw.get("scheme")
    if not isinstance(scheme, dict) or not isinstance(scheme.get("name"), str):
        raise _Wrong("scheme", "scheme must be an object with a name")
    values = []
    for key in ("workers", "stages", "microbatches"):
        value = scheme.get(key)
        if type(value) is not int or not 1 <= value <= LIMIT:
            raise _Wrong("scheme", f"scheme: {key} must be a whole number from 1 to {LIMIT}")
        values.append(value)
    if not all(type(value) in (int, str) for value in scheme.values()):
        raise _Wrong("scheme", "scheme: values must be numbers or strings")
    groups = raw.get("groups")
    if not isinstance(groups, list):
        raise _Wrong("groups", "groups must be a list of lists of ranks")
    values.append(len(groups))
    return _Sizes(*values)


def _header(raw: Mapping[str, Any], sizes: _Sizes, jobs: int) -> Header:
    """The header; `jobs`, the number of instructions, bounds the memory it may take."""
    order = raw.get("order")
    if not isinstance(order, dict) or set(order) != {"mode", "n", "cost"} or not isinstance(order["n"], str):
        raise _Wrong("order", "order must have mode, n and cost")
    if order["mode"] not in ("greedy", "strict"):
        raise _Wrong("order", "order: mode must be greedy or strict")
    cost = order["cost"]
    if not isinstance(cost, dict) or tuple(cost) not in DIRECTIONS.values():
        raise _Wrong("order", "order: cost must have F and B, or F, I and W")
    if not all(type(value) in (int, float) and 0 < value < 1e18 for value in cost.values()):
        raise _Wrong("order", "order: costs must be positive numbers")
    shape = (len(cost), sizes.stages, sizes.microbatches)
    if shape[0] * shape[1] * shape[2] > jobs or sizes.workers > jobs:
        raise _Wrong("scheme", f"the sizes ask for more jobs or workers than the {jobs} instructions of the file hold")
    slots, generator = raw.get("weight_slots"), raw.get("generator")
    if type(slots) is not int or not 1 <= slots <= LIMIT:
        raise _Wrong("weight_slots", "weight_slots must be a whole number of at least 1")
    if not isinstance(generator, str):
        raise _Wrong("generator", "generator must be a string")
    header = Header(
        scheme=raw["scheme"],
        mode=order["mode"],
        n=order["n"],
        cost=cost,
        weight_slots=slots,
        edges=_edges(raw.get("edges"), sizes),
        groups=_rank_lists("groups", raw.get("groups"), sizes),
        compute=_placement(raw, "compute", shape, sizes),
        weights=_placement(raw, "weights", shape, sizes),
        generator=generator,
    )
    if _rank_lists("owners", raw.get("owners"), sizes) != header.owners:
        raise _Wrong("owners", "owners do not agree with weights")
    if set(raw) - {"schedgen", "programs", "sha256"} != set(_KEYS):
        raise _Wrong("schedgen", f"the header must have exactly {', '.join(_KEYS)}")
    return header


def _edges(value: object, sizes: _Sizes) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair) for pair in value
    ):
        raise _Wrong("edges", "edges must be a list of pairs of stages")
    try:
        return check_edges(value, sizes.stages)
    except UsageError as error:
        raise _Wrong("edges", str(error)) from None


def _rank_lists(key: str, value: object, sizes: _Sizes) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise _Wrong(key, f"{key} must be a list of lists of ranks")
    for ranks in value:
        if (
            not isinstance(ranks, list)
            or not ranks
            or not all(type(rank) is int and 0 <= rank < sizes.workers for rank in ranks)
            or ranks != sorted(set(ranks))
        ):
            raise _Wrong(key, f"{key} must be lists of different ranks in 0..{sizes.workers - 1}, ascending")
    return tuple(map(tuple, value))


def _placement(raw: Mapping[str, Any], key: str, shape: tuple[int, int, int], sizes: _Sizes) -> Ints:
    value = raw.get(key)
    names = DIRECTIONS[shape[0]]
    if not isinstance(value, dict) or names[0] not in value or not set(value) <= set(names):
        raise _Wrong(key, f"{key} must have {names[0]} and may have {', '.join(names[1:])}")
    placement = np.empty(shape, np.int32)
    for d, name in enumerate(names):
        if name not in value:
            placement[d] = placement[d - 1]
            continue
        stages = value[name]
        if not isinstance(stages, list) or len(stages) != shape[1]:
            raise _Wrong(key, f"{key} {name} must list {shape[1]} stages")
        for s, row in enumerate(stages):
            workers = row if isinstance(row, list) else [row]
            if len(workers) not in (1, shape[2]) or (isinstance(row, list) and len(row) != shape[2]):
                raise _Wrong(key, f"{key} {name}: stage {s} must be a worker or a list of {shape[2]}")
            if not all(type(worker) is int and 0 <= worker < sizes.workers for worker in workers):
                raise _Wrong(key, f"{key} {name}: stage {s} names a worker outside 0..{sizes.workers - 1}")
            placement[d, s] = workers
    return placement


def _key_line(lines: Iterable[str], key: str) -> int:
    return next((i for i, line in enumerate(lines, start=1) if line.lstrip("{ ").startswith(f'"{key}"')), 1)


def _clip(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 80 else text[:77] + "..."
