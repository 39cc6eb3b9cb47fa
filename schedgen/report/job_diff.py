"""The jobs of two schedules side by side: on each rank the longest order that both keep, and what moved.

A column has a job of both or, above or below a gap, of one. An I counts as the B of its microbatch. Columns that repeat
on the next microbatches are shortened to the first and the last.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np

from schedgen.ir.instructions import COMPUTE, LETTER
from schedgen.ir.program import Program

Job = tuple[str, int, int]  # letter, stage, microbatch
Column = tuple[Job | None, Job | None]
DOTS = "..", 0, 0


def job_changes(a: Program, b: Program, width: int) -> Iterator[str]:
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
