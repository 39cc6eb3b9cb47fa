"""Write and read the schedule file: canonical JSON, one instruction a line.

Same program, same bytes. The header comes first, then every rank's list, then a SHA-256 of all lines above it (last, so
that a file is written in one pass, and a truncated file is noticed). `read` accepts exactly what `write` makes, and
a refusal names the line; `parse` is the lenient reader that `schedgen seal` uses on files edited by hand.
Every number is checked against the header's sizes before anything is built from it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from schedgen.ir.header import Header
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.limits import Limits
from schedgen.ir.line_codec import State, line_of_item, read_lines, write_lines
from schedgen.ir.program import Program, Rows, concatenate
from schedgen.ir.validate_header import Wrong, read_header, read_limits
from schedgen.ir.version_1 import from_version_1
from schedgen.util.arrays import Ints
from schedgen.util.errors import RefusedFile
from schedgen.util.files import read_json

VERSION = 2
CHUNK = 2**16  # rows written at a time
BLOCK = 2**20  # bytes of lists read at a time
LINE_FEED = b"\n"

_PROGRAMS = ' "programs": ['
# The lines behind the lists, and what is said of any other.
_END = (
    (rb" \],\n", "the programs should end here, with ' ],'"),
    (rb' "sha256": "[0-9a-f]{64}"\n', "the SHA-256 of the lines above should stand here"),
    (rb"\}\n", "the file should end with one line '}' here"),
)


# Writing


def write(program: Program, out: BinaryIO) -> None:
    """Write a projected program as one canonical file."""
    digest = hashlib.sha256()

    def put(data: bytes) -> None:
        digest.update(data)
        out.write(data)

    put("".join(f"{line}\n" for line in header_lines(program.header)).encode("ascii"))
    for rank, (begin, end) in enumerate(itertools.pairwise(program.bounds.tolist())):
        put(b"  [\n")
        for first in range(begin, end, CHUNK):
            last = min(first + CHUNK, end)
            put(write_lines(program.rows.take(slice(first, last)), last == end))
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
        **({"parts": header.parts} if header.parts else {}),
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


class _Content(NamedTuple):
    data: bytes
    name: str

    def refuse(self, at: int, reason: str) -> RefusedFile:
        """The error to raise for the line in which byte `at` is."""
        return RefusedFile(f"{self.name}:{self.data.count(LINE_FEED, 0, at) + 1}: {reason}")

    def end_of_line(self, at: int) -> int:
        """The index behind the line in which byte `at` is."""
        end = self.data.find(LINE_FEED, at) + 1
        if not end:
            words = "the file ends within this line" if self.data[at:] else "the file ends here, before its end"
            raise self.refuse(len(self.data), words)
        return end


def read(source: BinaryIO, name: str) -> tuple[Program, str | None]:
    """The program in a canonical file, and an error message if its SHA-256 is wrong, else None.

    Raises RefusedFile, naming the line, if a line is not what `write` writes.
    A wrong hash is left to the caller, who can first check the program, which
    may name the damaged instruction.
    """
    content = _Content(source.read(), name)
    lines, begin = _read_header_lines(content)
    try:
        raw = json.loads("\n".join(lines) + "]}")
    except (ValueError, RecursionError) as error:
        where = getattr(error, "lineno", len(lines))
        raise RefusedFile(f"{name}:{where}: the header is not JSON: {getattr(error, 'msg', error)}") from None
    try:
        limits = read_limits(raw)
        table, end = _read_lists(content, begin, limits)
        header = read_header(raw, limits, jobs=len(table.op))
    except Wrong as wrong:
        begins = (i for i, line in enumerate(lines, 1) if line.lstrip("{ ").startswith(f'"{wrong.key}"'))
        raise RefusedFile(f"{name}:{next(begins, 1)}: {wrong}") from None
    for number, (line, written) in enumerate(zip(lines, header_lines(header), strict=False), start=1):
        if line != written:
            raise RefusedFile(f"{name}:{number}: not in canonical form; `schedgen seal` rewrites it")
    return Program(header, table), _read_end(content, end)


def _read_header_lines(content: _Content) -> tuple[list[str], int]:
    """The header's lines in today's format version, and the index of the first list behind them."""
    first = content.data[: content.end_of_line(0) - 1]
    version = re.fullmatch(rb'\{"schedgen": (\d{1,9}),', first)
    if version is None:
        reason = "its lines end in CR LF, not LF" if first.endswith(b"\r") else "its first line is wrong"
        raise content.refuse(0, f'not a schedule file: {reason}, it should be {{"schedgen": {VERSION},')
    if int(version[1]) > VERSION:
        raise content.refuse(0, f"format version {int(version[1])} is newer than this schedgen reads ({VERSION})")
    if int(version[1]) < 1:
        raise content.refuse(0, f"there is no format version {int(version[1])}")
    end = content.data.find(f"\n{_PROGRAMS}\n".encode()) + 1
    if not end:
        content.end_of_line(content.data.rfind(LINE_FEED) + 1)
    end = content.end_of_line(end)
    text = content.data[:end].decode("ascii", "backslashreplace")
    return (from_version_1(text) if int(version[1]) == 1 else text).split("\n")[:-1], end


def _read_lists(content: _Content, at: int, limits: Limits) -> tuple[Rows, int]:
    """The instructions of all ranks, from byte `at`, and the index behind them."""
    state, blocks = State(), list[Rows]()
    while state.rank < limits.workers:
        end = content.data.rfind(LINE_FEED, at, at + BLOCK) + 1 or content.end_of_line(at)
        taken = read_lines(content.data[at:end], state, limits)
        state, at = taken.state, at + taken.size
        if taken.wrong:
            raise content.refuse(at, f"rank {state.rank}: {taken.wrong}")
        blocks.append(taken.rows)
    return concatenate(blocks), at


def _read_end(content: _Content, at: int) -> str | None:
    """Read what follows the lists, from byte `at`; an error message if the SHA-256 is wrong."""
    begins = [at]
    for pattern, words in _END:
        begins.append(content.end_of_line(begins[-1]))
        if not re.fullmatch(pattern, content.data[begins[-2] : begins[-1]]):
            raise content.refuse(begins[-2], words)
    if begins[-1] < len(content.data):
        raise content.refuse(begins[-2], _END[-1][1])
    digest = hashlib.sha256(memoryview(content.data)[: begins[1]]).hexdigest()
    if digest.encode() in content.data[begins[1] :]:
        return None
    reason = "the SHA-256 does not match the lines above: the file was damaged or edited"
    return str(content.refuse(begins[1], reason))


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
        lists = ["  [\n" + ",\n".join(map(line_of_item, listed)) + "\n" * bool(listed) for listed in programs]
        taken = read_lines("  ],\n".join(lists).encode() + b"  ]\n", State(), limits)
        if taken.wrong:
            index = np.count_nonzero(taken.rows.rank == taken.state.rank)
            raise Wrong("programs", f"rank {taken.state.rank}, instruction {index}: {taken.wrong}")
        header = read_header(raw, limits, jobs=len(taken.rows.op))
    except (TypeError, RecursionError):
        raise RefusedFile(f"{name}: programs must be lists of instructions") from None
    except Wrong as wrong:
        raise RefusedFile(f"{name}: {wrong}") from None
    return Program(header, concatenate([taken.rows]))  # as arrays of their own
