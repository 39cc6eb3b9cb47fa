"""The schedule file: canonical JSON, one instruction a line, in and out.

Same program, same bytes. The header comes first, then every rank's list, then
a SHA-256 of all lines above it (last, so that a file is written in one pass
and a file cut short is noticed). Reading accepts exactly what writing makes
and refuses anything else with its line; `parse` is the lenient reader that
`schedgen seal` uses on files edited by hand. Every number read is checked
against the header's bounds before anything is built from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from schedgen.decode import KEYS, Bounds, Wrong, clip, read_bounds
from schedgen.decode import header as decode_header
from schedgen.decode import instruction as decode_instruction
from schedgen.errors import RefusedFile
from schedgen.program import DIRECTIONS, AnyInts, Header, Instruction, Ints, Program, Rows, rows

VERSION = 1

_PROGRAMS = ' "programs": ['


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
    lines += [f' "{key}": {json.dumps(value)},' for key, value in zip(KEYS, values, strict=False)]
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
        bounds = read_bounds(raw)
        counts: list[int] = []
        numbers = np.concatenate([np.empty((0, 6), np.int32), *_programs(lines, bounds, counts)])
        header = decode_header(raw, bounds, jobs=len(numbers))
    except Wrong as wrong:
        raise RefusedFile(f"{name}:{_key_line(header_text, wrong.key)}: {wrong}") from None
    for number, (got, expected) in enumerate(zip(header_text, header_lines(header), strict=False), start=1):
        if got != expected:
            raise RefusedFile(f"{name}:{number}: not in canonical form; `schedgen seal` rewrites it")
    program = Program(header, _rows(np.repeat(np.arange(bounds.workers), counts), numbers))
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
        bounds = read_bounds(raw)
        programs = raw.get("programs")
        if not isinstance(programs, list) or len(programs) != bounds.workers:
            raise Wrong("programs", f"programs must be a list of {bounds.workers} lists, one a worker")
        numbers: list[Instruction] = []
        for rank, listed in enumerate(programs):
            if not isinstance(listed, list):
                raise Wrong("programs", f"the program of rank {rank} must be a list")
            for i, item in enumerate(listed):
                try:
                    numbers.append(decode_instruction(item, bounds))
                except ValueError as error:
                    raise Wrong("programs", f"rank {rank}, instruction {i}: {error}") from None
        header = decode_header(raw, bounds, jobs=len(numbers))
    except Wrong as wrong:
        raise RefusedFile(f"{name}: {wrong}") from None
    ranks = np.repeat(np.arange(bounds.workers), [len(listed) for listed in programs])
    return Program(header, _rows(ranks, np.array(numbers, np.int32).reshape(-1, 6)))


def _rows(rank: AnyInts, numbers: Ints) -> Rows:
    op, kind, stage, mb, via, peer = numbers.T
    return rows(op, rank, kind=kind, stage=stage, mb=mb, via=via, peer=peer)


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


def _programs(lines: _Lines, bounds: Bounds, counts: list[int]) -> Iterator[Ints]:
    """Every rank's instructions as an array (length, 6); fills `counts` with the lengths."""
    known: dict[str, Instruction] = {}
    for rank in range(bounds.workers):
        if next(lines) != "  [":
            raise lines.refuse(f"the program of rank {rank} should begin here, with '  ['")
        end = "  ]," if rank + 1 < bounds.workers else "  ]"
        found: list[Instruction] = []
        comma = True
        while (line := next(lines)) != end:
            if not comma:
                raise lines.refuse(f"rank {rank}: a comma is missing at the end of the line before, or this is its end")
            text, comma = (line[:-1], True) if line.endswith(",") else (line, False)
            instruction = known.get(text)
            if instruction is None:
                instruction = known[text] = _parse_line(lines, rank, text, bounds)
            found.append(instruction)
        if found and comma:
            raise lines.refuse(f"rank {rank}: the list ends here, but a comma stands before")
        counts.append(len(found))
        yield np.array(found, np.int32).reshape(-1, 6)
    if next(lines) != " ],":
        raise lines.refuse("the programs should end here, with ' ],'")


def _parse_line(lines: _Lines, rank: int, text: str, bounds: Bounds) -> Instruction:
    try:
        instruction = decode_instruction(json.loads(text), bounds)
    except (ValueError, RecursionError) as error:
        reason = f"not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else str(error)
        raise lines.refuse(f"rank {rank}: {clip(text)}: {reason}") from None
    if text != f"   {instruction}":
        raise lines.refuse(f"rank {rank}: {clip(text)}: not in canonical form; `schedgen seal` rewrites it")
    return instruction


def _key_line(lines: Iterable[str], key: str) -> int:
    return next((i for i, line in enumerate(lines, start=1) if line.lstrip("{ ").startswith(f'"{key}"')), 1)
