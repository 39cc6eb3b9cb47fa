"""What changed between two schedules: header and numbers in words, then each rank's list as a unified diff.

Or jobs side by side: on each rank the longest order that both keep, and what moved. A column has a job of both or,
above or below a gap, of one. An I counts as the B of its microbatch. Columns that repeat on the next microbatches are
shortened to the first and the last.
"""

from __future__ import annotations

import shutil
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import numpy as np

from schedgen.ir.file import header_entries, line_of
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, DIRECTIONS, LETTER
from schedgen.ir.program import Program
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError, clip

CONTEXT = 2  # rows shown around a change
Job = tuple[str, int, int]  # letter, stage, microbatch
Column = tuple[Job | None, Job | None]
DOTS = "..", 0, 0


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
        yield from _job_changes(a, b, shutil.get_terminal_size().columns)
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


def _job_changes(a: Program, b: Program, width: int) -> Iterator[str]:
    """The lines, of at most `width` columns, for two schedules of the same stages and microbatches."""
    lists = _jobs(a), _jobs(b)
    ranks = [{job: rank for rank, jobs in enumerate(each) for job in jobs} for each in lists]
    for rank, (old, new) in enumerate(zip_longest(*lists, fillvalue=dict[Job, str]())):
        if [*old.items()] == [*new.items()]:
            continue
        columns, several = _columns([*old], [*new]), len({stage for _, stage, _ in old | new}) > 1
        words = [f"{len(old.keys() & new) - sum(None not in each for each in columns)} moved"]
        for jobs, others, way in ((old.keys() - new, ranks[1], "to"), (new.keys() - old, ranks[0], "from")):
            counts = Counter(f"{way} {f'rank {others[job]}' if job in others else 'no rank'}" for job in jobs)
            words += [f"{count} {where}" for where, count in sorted(counts.items())]
        yield f"rank {rank}: {len(new)} jobs, {', '.join(words)}"
        lines = ["-", "+"]
        for column in _shortened(columns):
            texts = [
                "" if not job else ".." if job == DOTS else f"{own[job]}{f'{job[1]}.' if several else ''}{job[2]}"
                for job, own in zip(column, (old, new), strict=True)
            ]
            wide = max(map(len, texts))
            if len(lines[0]) + 1 + wide > width:
                yield from map(str.rstrip, lines)
                lines = ["-", "+"]
            lines = [f"{line} {text.ljust(wide)}" for line, text in zip(lines, texts, strict=True)]
        yield from map(str.rstrip, lines)


def _jobs(program: Program) -> list[dict[Job, str]]:
    """By rank: its jobs in their order, with their letters; an I is the job of a B."""
    lists: list[dict[Job, str]] = [{} for _ in range(program.header.workers)]
    table = program.rows.take(program.rows_of(*COMPUTE))
    for rank, op, stage, mb in np.stack([table.rank, table.op, table.stage, table.mb], axis=1).tolist():
        letter = LETTER.get(op, "R")
        lists[rank][letter.replace("I", "B"), stage, mb] = letter
    return lists


def _columns(old: list[Job], new: list[Job]) -> list[Column]:
    """Both lists, aligned by their longest common order."""
    place = {job: k for k, job in enumerate(new)}
    chains: list[Any] = [(-1, None)]  # by length of a common order: (the least end, the chain before)
    for at in (place[job] for job in old if job in place):
        k = bisect(chains, at, key=lambda chain: chain[0])
        chains[k : k + 1] = [(at, chains[k - 1])]
    chain, common = chains[-1], set()
    while chain:
        common.add(chain[0])
        chain = chain[1]
    columns: list[Column] = []
    done = 0
    for job in old:
        if (at := place.get(job, -2)) in common:
            columns += [*((None, each) for each in new[done:at]), (job, job)]
            done = at + 1
        else:
            columns.append((job, None))
    return columns + [(None, each) for each in new[done:]]


def _shortened(columns: list[Column]) -> Iterator[Column]:
    """The columns, with DOTS in place of the middle of a repetition."""
    i = 0
    while i < len(columns):
        runs = []
        for period in range(1, 5):
            end = i + period
            while end < len(columns) and columns[end] == tuple(j and (*j[:2], j[2] + 1) for j in columns[end - period]):
                end += 1
            runs.append(((end - i) // period * period, -period))
        length, period = max(runs)[0], -max(runs)[1]
        if length < 2 * period + 2:  # dots would save nothing
            length = period = 1
        yield from columns[i : i + period]
        if length > period:
            old, new = (DOTS if any(side) else None for side in zip(*columns[i : i + period], strict=True))
            yield old, new
            yield from columns[i + length - period : i + length]
        i += length
