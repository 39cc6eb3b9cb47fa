"""What changed between two schedules: header and numbers in words, then each rank's list as a unified diff."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from schedgen.ir.file import header_entries, line_of
from schedgen.ir.header import Header
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.program import Program
from schedgen.report.job_diff import job_changes
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError, clip

CONTEXT = 2  # rows shown around a change


def diff(a: Program, b: Program, a_name: str, b_name: str, jobs: bool = False) -> Iterator[str]:
    """The diff's lines, none if the programs are equal; line numbers are those of the files `a_name` and `b_name`.

    `jobs`: show the order of jobs, not all instructions; UsageError if stages or microbatches differ.
    """
    sizes = [f"{each.stages} stages and {each.microbatches} microbatches" for each in (a.header, b.header)]
    if jobs and sizes[0] != sizes[1]:
        raise UsageError(f"--jobs compares schedules of the same sizes, not {sizes[0]} with {sizes[1]}")
    headers = list(_header_changes(a.header, b.header))
    changed = not all(np.array_equal(old, new) for old, new in zip(a.rows.columns(), b.rows.columns(), strict=True))
    if not headers and not changed:
        return
    for key, old, new in headers:
        yield f"{key}: {clip(str(old))} -> {clip(str(new))}"
    same = []
    for (key, old), new in zip(_numbers(a).items(), _numbers(b).values(), strict=True):
        if old != new:
            yield f"{key}: {_formatted(key, old)} -> {_formatted(key, new)}"
        elif old:
            same.append(f"{key} {_formatted(key, old)}")
    if same:
        yield f"unchanged: {', '.join(same)}"
    if changed and jobs:
        yield from job_changes(a, b, shutil.get_terminal_size().columns)
    elif changed:
        yield from _unified(a, b, a_name, b_name)


def _header_changes(a: Header, b: Header) -> Iterator[tuple[str, object, object]]:
    """(name, old value, new value) of each entry of the headers that differs."""
    for entries in zip(_entries(a), _entries(b), strict=True):
        for key in entries[0] | entries[1]:
            old, new = (values.get(key) for values in entries)
            if old != new:
                yield key, old, new
    for key, old, new in (("weights", a.weights, b.weights), ("compute", a.compute, b.compute)):
        common = tuple(slice(min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))
        moved = int((old[common] != new[common]).sum())
        if moved:
            yield key, f"{moved} of the jobs that both have", "another worker"


def _entries(header: Header) -> tuple[dict[str, object], dict[str, object]]:
    """The header's entries in a file except for the placement of jobs: those of the scheme, and the rest."""
    entries = header_entries(header)
    tensor = {f"tensor {key}": value for key, value in entries.pop("tensor", {}).items()}
    owners = {"owners named by": " ".join(DIRECTIONS[len(header.weights)])} if header.is_forward else {}
    return entries.pop("scheme"), {**entries.pop("order"), **tensor, **entries.pop("lowering"), **entries, **owners}


def _formatted(key: str, value: float) -> str:
    return f"{value:.4%}" if key == "bubble" else f"{value:.12g}"


def _numbers(program: Program) -> dict[str, float]:
    """The numbers of a schedule under its own costs; those that differ by rounding are equal."""
    numbers: dict[str, Any] = stats(program)
    peaks = [worker["peak_memory"] for worker in numbers["workers"]]
    return {
        "latency": float(f"{numbers['latency']:.12g}"),
        "bubble": round(numbers["bubble"], 12),
        **{f"peak {kind}": max(peak[kind] for peak in peaks) for kind in peaks[0]},
        **{key: numbers[key] for key in ("messages", "collectives", "instructions")},
    }


def _unified(a: Program, b: Program, a_name: str, b_name: str) -> Iterator[str]:
    for rank in range(max(a.header.workers, b.header.workers)):
        (old, old_line), (new, new_line) = (_listed(program, rank) for program in (a, b))
        if old == new:
            continue
        yield from (f"--- {a_name} rank {rank}", f"+++ {b_name} rank {rank}")
        for hunk in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
            old_range = _range(old_line, hunk[0][1], hunk[-1][2])
            yield f"@@ -{old_range} +{_range(new_line, hunk[0][3], hunk[-1][4])} @@"
            for tag, i, i2, j, j2 in hunk:
                yield from (f"{' ' if tag == 'equal' else '-'}{text}" for text in old[i:i2])
                yield from (f"+{text}" for text in (() if tag == "equal" else new[j:j2]))


def _listed(program: Program, rank: int) -> tuple[list[str], int]:
    """The instructions of a rank as text, and the line of the first one in the schedule's file."""
    if rank >= program.header.workers:
        return [], 1
    line = line_of(program, 0, 0) + int(program.bounds[rank]) + 2 * rank  # two lines end a list and begin the next
    return [str(i) for i in program.instructions(rank)], line


def _range(first_line: int, begin: int, stop: int) -> str:
    """Rows `begin` to `stop` - 1 as lines of the file: the first one, or the one before if there are no rows."""
    count = stop - begin
    line = first_line + begin - (count == 0)
    return f"{line}" if count == 1 else f"{line},{count}"
