"""Write and read the schedule file: canonical JSON, one instruction a line.

Same program, same bytes. The header comes first, then every rank's list, then a SHA-256 of all lines above it (last, so
that a file is written in one pass, and a truncated file is noticed). `read` accepts exactly what `write` makes, and
a refusal names the line; `parse` is the lenient reader that `schedgen seal` uses on files edited by hand.
Every number is checked against the header's sizes before anything is built from it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.header import Header
from schedgen.ir.instructions import DIRECTIONS, Instruction
from schedgen.ir.limits import MOST_ROWS, Limits
from schedgen.ir.line_codec import CLOSE, LAST, State, read_lines, write_lines
from schedgen.ir.program import Program, Rows, rows
from schedgen.ir.validate_header import Wrong, read_header, read_limits
from schedgen.ir.validate_instruction import instruction
from schedgen.ir.version_1 import from_version_1
from schedgen.util.arrays import Ints
from schedgen.util.errors import RefusedFile, clip
from schedgen.util.files import BLOCK
from schedgen.util.parse_json import read_json
from schedgen.util.progress import counted

VERSION = 2
CHUNK = 2**16  # rows written at a time
MOST_LINE = 2**27  # bytes of a line of the header
MOST_SHOWN = 256  # bytes of a wrong line that are read as an instruction: twice as many as the longest has
MOST_HEADER = 2**28  # bytes of a header, where each line counts 64 bytes more

_PROGRAMS = ' "programs": ['


# Writing


def write(program: Program, out: BinaryIO) -> None:
    """Write a projected program as one canonical file."""
    digest = hashlib.sha256()

    def put(data: bytes) -> None:
        digest.update(data)
        out.write(data)

    put("".join(f"{line}\n" for line in header_lines(program.header)).encode("ascii"))
    with counted("write", len(program), " instructions") as done:
        for rank, (begin, end) in enumerate(itertools.pairwise(program.bounds.tolist())):
            put(b"  [\n")
            for first in range(begin, end, CHUNK):
                last = min(first + CHUNK, end)
                put(write_lines(program.rows.take(slice(first, last)), last == end))
                done(last - first)
            put(b"  ],\n" if rank + 1 < program.header.workers else b"  ]\n")
    put(b" ],\n")
    out.write(f' "sha256": "{digest.hexdigest()}"\n}}\n'.encode("ascii"))


def header_lines(header: Header) -> list[str]:
    """The lines before the first rank's list."""
    lines = [f'{{"schedgen": {VERSION},', *(f' "{key}": {json.dumps(x)},' for key, x in header_entries(header).items())]
    for key, placement in (("weights", header.weights), ("compute", header.compute)):
        lines += _placement_lines(key, placement)
    return [*lines, _PROGRAMS]


def header_entries(header: Header) -> dict[str, Any]:
    """The header's entries in a file, except for the placement of jobs."""
    graph, tensor = header.graph, header.tensor_parallel
    return {
        "generator": header.generator,
        "scheme": dict(header.scheme),
        "order": {"mode": header.mode, "n": header.n, "cost": dict(header.cost)},
        "lowering": dict(header.lowering),
        "edges": graph.edges,
        **({"per_consumer": graph.per_consumer} if graph.per_consumer else {}),
        "tied": header.tied,
        "owners": header.owners,
        "groups": header.groups,
        **({"shards": header.shard_owners} if header.shard_owners else {}),
        **({"tensor": {"degree": tensor.degree, "replicated": tensor.replicated}} if tensor else {}),
    }


def _placement_lines(key: str, placement: Ints) -> list[str]:
    """For each direction that differs from the one before: a line of workers by stage, or a line for each stage."""
    lines = [f' "{key}": {{']
    for d, name in enumerate(DIRECTIONS[len(placement)]):
        if d and (placement[d] == placement[d - 1]).all():
            continue
        if d:
            lines[-1] += ","
        rows = [int(row[0]) if (row == row[0]).all() else row.tolist() for row in placement[d]]
        if all(type(row) is int for row in rows):
            lines.append(f'  "{name}": {rows}')
        else:
            lines += [f'  "{name}": [', *(f"   {row}," for row in rows[:-1]), f"   {rows[-1]}", "  ]"]
    return [*lines, " },"]


def line_of(program: Program, row: int, rank: int | None = None) -> int:
    """The line (from 1) of a row of a projected program in its file; `rank`: whose list it is counted in."""
    rank = int(program.rows.rank[row]) if rank is None else rank
    return len(header_lines(program.header)) + 2 * rank + row + 2


# Reading


def read(source: BinaryIO, name: str) -> tuple[Program, str | None]:
    """The program in a canonical file, and an error message if its SHA-256 is wrong, else None.

    Raises RefusedFile, naming the line, if a line is not what `write` writes.
    A wrong hash is left to the caller, who can first check the program, which
    may name the damaged instruction.
    """
    lines = _Lines(source, name)
    header_text = _header_text(lines)
    try:
        raw = json.loads("\n".join(header_text) + "]}")
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", lines.number)
        raise RefusedFile(f"{name}:{line}: the header is not JSON: {getattr(error, 'msg', error)}") from None
    try:
        limits = read_limits(raw)
        table = _read_programs(lines, limits)
        header = read_header(raw, limits, jobs=len(table.op))
    except Wrong as wrong:
        raise RefusedFile(f"{name}:{_key_line(header_text, wrong.key)}: {wrong}") from None
    for number, (line_read, line) in enumerate(zip(header_text, header_lines(header), strict=False), start=1):
        if line_read != line:
            raise RefusedFile(f"{name}:{number}: not in canonical form; `schedgen seal` rewrites it")
    digest = lines.digest.hexdigest()
    stored = re.fullmatch(r' "sha256": "([0-9a-f]{64})"', next(lines))
    if stored is None:
        raise lines.refuse("the SHA-256 of the lines above should stand here")
    fault = None
    if stored[1] != digest:
        fault = f"{name}:{lines.number}: the SHA-256 does not match the lines above: the file was damaged or edited"
    if next(lines) != "}" or not lines.ended():
        raise lines.refuse("the file should end with one line '}' here")
    return Program(header, table), fault


def _header_text(lines: _Lines) -> list[str]:
    """The header's lines, with the one that begins the lists, in the words of today's version; the first is checked."""
    first = next(lines)
    version = re.fullmatch(r'\{"schedgen": (\d{1,9}),', first)
    if version is None:
        reason = "its lines end in CR LF, not LF" if first.endswith("\r") else "its first line is wrong"
        raise lines.refuse(f'not a schedule file: {reason}, it should be {{"schedgen": {VERSION},')
    if int(version[1]) > VERSION:
        raise lines.refuse(f"format version {version[1]} is newer than this schedgen reads ({VERSION})")
    if int(version[1]) < 1:
        raise lines.refuse(f"there is no format version {version[1]}")
    header_text, room = [first], MOST_HEADER
    while header_text[-1] != _PROGRAMS:
        header_text.append(next(lines))
        room -= len(header_text[-1]) + 64
        if room < 0:
            raise lines.refuse("the header is too long")
    return from_version_1("\n".join(header_text)).split("\n") if int(version[1]) == 1 else header_text


def stored_hash(source: BinaryIO) -> str:
    """The SHA-256 at the end of a canonical file that `read` has accepted."""
    source.seek(-len(f'{"0" * 64}"\n}}\n'), 2)
    return source.read(64).decode("ascii")


def parse(content: str, name: str) -> Program:
    """The program in the text of file `name`, which may be edited by hand: any JSON layout, any or no hash."""
    raw = read_json(content, name)
    if isinstance(raw, dict) and raw.get("schedgen") == 1:
        raw = read_json(from_version_1(content), name)
    if not isinstance(raw, dict) or raw.get("schedgen") != VERSION:
        raise RefusedFile(f'{name}: not a schedule file of format version {VERSION} ("schedgen": {VERSION})')
    try:
        limits = read_limits(raw)
        programs = raw.get("programs")
        if not isinstance(programs, list) or len(programs) != limits.workers:
            raise Wrong("programs", f"programs must be a list of {limits.workers} lists, one a worker")
        instructions: list[Instruction] = []
        for rank, listed in enumerate(programs):
            if not isinstance(listed, list):
                raise Wrong("programs", f"the program of rank {rank} must be a list")
            for i, item in enumerate(listed):
                try:
                    instructions.append(instruction(item, limits))
                except ValueError as error:
                    raise Wrong("programs", f"rank {rank}, instruction {i}: {error}") from None
        header = read_header(raw, limits, jobs=len(instructions))
    except Wrong as wrong:
        raise RefusedFile(f"{name}: {wrong}") from None
    ranks = np.repeat(np.arange(limits.workers), [len(listed) for listed in programs])
    op, kind, stage, mb, piece, operand = np.array(instructions, np.int32).reshape(-1, 6).T
    return Program(header, rows(op, ranks, kind=kind, stage=stage, mb=mb, piece=piece, operand=operand))


class _Lines:
    """A file's lines, hashed and counted as they are read; an error is a RefusedFile that names the line."""

    def __init__(self, source: BinaryIO, name: str) -> None:
        """Nothing is read yet."""
        self.source, self.name, self.number, self.digest = source, name, 0, hashlib.sha256()
        self.rest = b""  # read from the source, but not taken yet

    def __next__(self) -> str:
        """The next line, without its line feed."""
        end = self.rest.find(b"\n") + 1
        if end:
            data, self.rest = self.rest[:end], self.rest[end:]
        else:
            data, self.rest = self.rest + self.source.readline(MOST_LINE), b""
            if len(data) >= MOST_LINE:
                self.number += 1
                raise self.refuse("the line is too long")
        self.number += 1
        if not data.endswith(b"\n"):
            raise self.refuse("the file ends here, before its end" if not data else "the file ends within this line")
        self.digest.update(data)
        try:
            return data[:-1].decode("ascii")
        except UnicodeDecodeError:
            raise self.refuse("not ASCII text") from None

    def read_block(self) -> bool:
        """Read another block; False at the end of the source."""
        data = self.source.read(BLOCK)
        self.rest += data
        return bool(data)

    def whole(self) -> bytes:
        """The whole lines that are read from the source, but not taken yet."""
        return self.rest[: self.rest.rfind(b"\n") + 1]

    def take(self, count: int) -> None:
        """Take the next `count` lines, which are read already."""
        feeds = np.flatnonzero(np.frombuffer(self.rest, np.uint8) == ord("\n"))
        size = int(feeds[count - 1]) + 1 if count else 0
        self.digest.update(memoryview(self.rest)[:size])
        self.rest = self.rest[size:]
        self.number += count

    def ended(self) -> bool:
        """Whether the file ends here."""
        return not self.rest and not self.source.read(1)

    def refuse(self, reason: str) -> RefusedFile:
        """The error to raise for the line that was read last."""
        return RefusedFile(f"{self.name}:{self.number}: {reason}")


def _read_programs(lines: _Lines, limits: Limits) -> Rows:
    """Read every rank's list, up to and including the bracket that ends them all."""
    state = State()
    blocks: list[list[NDArray[Any]]] = [[] for _ in Rows._fields]  # by column
    length = 0
    with counted("read", None, " instructions") as done:
        while state.rank < limits.workers:
            more = lines.read_block()
            taken = read_lines(lines.whole(), state, limits)
            if taken is None or not (more and len(lines.rest) <= 2 * BLOCK):
                raise _wrong_line(lines, state, limits)
            state = taken.state
            for column, block in zip(blocks, taken.rows.columns(), strict=True):
                column.append(block)
            length += len(taken.rows.op)
            if length > MOST_ROWS:
                raise lines.refuse(f"more than {MOST_ROWS} instructions: too many")
            lines.take(taken.lines)
            done(len(taken.rows.op))
    if next(lines) != " ],":
        raise lines.refuse("the programs should end here, with ' ],'")
    return Rows(*(np.concatenate(blocks.pop(0)) for _ in Rows._fields))  # frees each column's blocks once it is whole


def _wrong_line(lines: _Lines, state: State, limits: Limits) -> RefusedFile:
    """The error to raise for the first of the next lines that `write` would not write."""
    whole = lines.whole()
    ends = [match.end() for match in re.finditer(b"\n", whole)]
    good = bisect.bisect_left(ends, True, key=lambda end: read_lines(whole[:end], state, limits) is None)
    before = read_lines(whole[: ends[good - 1]] if good else b"", state, limits)
    assert before is not None
    lines.take(before.lines)
    rank, line = before.state.rank, next(lines)
    if before.state.line == CLOSE:
        return lines.refuse(f"the program of rank {rank} should begin here, with '  ['")
    if line.startswith("  ]"):
        end = "  ]," if rank + 1 < limits.workers else "  ]"
        reason = "a comma stands before this end of its list" if line == end else f"its list should end with '{end}'"
        return lines.refuse(f"rank {rank}: {reason}")
    if before.state.line == LAST:
        return lines.refuse(f"rank {rank}: a comma is missing at the end of the line before, or this is its end")
    item = line.removesuffix(",")[:MOST_SHOWN]
    try:
        instruction(json.loads(item), limits)
    except (ValueError, RecursionError) as error:
        reason = f"not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else str(error)
        return lines.refuse(f"rank {rank}: {clip(item)}: {reason}")
    return lines.refuse(f"rank {rank}: {clip(item)}: not in canonical form; `schedgen seal` rewrites it")


def _key_line(lines: Iterable[str], key: str) -> int:
    """The line (from 1) of the header where the entry `key` begins; 1 if there is none."""
    return next((i for i, line in enumerate(lines, start=1) if line.lstrip("{ ").startswith(f'"{key}"')), 1)
