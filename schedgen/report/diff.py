"""What changed between two schedules: header and numbers in words, then each rank's list as a unified diff."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.file import CHUNK, header_entries, line_of
from schedgen.ir.header import Header
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.line_codec import write_lines
from schedgen.ir.program import Program, Rows, concatenate
from schedgen.report.patience_match import patience_match
from schedgen.simulator.stats import stats
from schedgen.util.arrays import Ints, Numbers
from schedgen.util.errors import clip

CONTEXT = 2  # rows shown around a change
_SAME, _OLD, _NEW = 0, 1, 2
_SIGN = (" ", "-", "+")


def diff(a: Program, b: Program, a_name: str, b_name: str) -> Iterator[str]:
    """The diff's lines, none if the programs are equal; line numbers are those of the files `a_name` and `b_name`."""
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
    if changed:
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
    owners = {"owners named by": " ".join(DIRECTIONS[len(header.weights)])}
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


class _Merged(NamedTuple):
    """Both lists merged in the order of a unified diff: by rank, removed rows before added ones."""

    rank: Ints
    sign: Numbers  # _SAME, _OLD or _NEW
    row: Numbers  # index of a's rows followed by b's; of _SAME, a's
    before: tuple[Numbers, Numbers]  # how many rows of a, and of b, come before it


def _unified(a: Program, b: Program, a_name: str, b_name: str) -> Iterator[str]:
    both = concatenate([a.rows, b.rows])
    merged = _merge(both, len(a))
    changes = np.flatnonzero(merged.sign)
    hunk = np.zeros(len(merged.sign) + 1, np.int64)  # +1 where a change's context begins, -1 after its end
    ranks = merged.rank[changes]
    begins, ends = np.searchsorted(merged.rank, ranks), np.searchsorted(merged.rank, ranks, "right")
    np.add.at(hunk, np.maximum(changes - CONTEXT, begins), 1)
    np.add.at(hunk, np.minimum(changes + CONTEXT + 1, ends), -1)
    shown = np.flatnonzero(np.cumsum(hunk)[:-1])
    breaks = (np.diff(shown) > 1) | (np.diff(merged.rank[shown]) > 0)
    starts = np.append(0, np.flatnonzero(breaks) + 1)
    stops = np.append(starts[1:], len(shown))
    lines = _lines(both, merged, shown)
    first = [line_of(program, 0, 0) for program in (a, b)]
    last = -1
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        part = shown[start:stop]
        rank, sign = int(merged.rank[part[0]]), merged.sign[part]
        if rank != last:
            yield from (f"--- {a_name} rank {rank}", f"+++ {b_name} rank {rank}")
            last = rank
        ranges = []
        for side, (program, other) in enumerate(((a, _NEW), (b, _OLD))):
            count = int((sign != other).sum())
            line = first[side] + int(merged.before[side][part[0]]) + 2 * rank
            line = line if count else line - 1  # if no row of this side is shown, the line before
            line = line if rank < program.header.workers else 0
            ranges.append(f"{line}" if count == 1 else f"{line},{count}")
        yield f"@@ -{ranges[0]} +{ranges[1]} @@"
        for _ in part:
            yield next(lines)


def _merge(both: Rows, length: int) -> _Merged:
    """Merge `both`: the rows of a, which are the first `length`, and those of b."""
    partner = patience_match(*np.split(_codes(both), [length]))
    matched = partner >= 0
    new = np.ones(len(both.op) - length, np.bool_)
    new[partner[matched]] = False
    row = np.concatenate([np.arange(length), length + np.flatnonzero(new)])
    rank, sign = both.rank[row], np.full(len(row), _NEW)
    sign[:length] = np.where(matched, _SAME, _OLD)
    pairs = np.concatenate([np.cumsum(matched), np.cumsum(~new)[new]])  # pairs up to each row, itself included
    order = np.lexsort((sign, pairs, rank))
    rank, sign, row = rank[order], sign[order], row[order]
    before = [np.cumsum(sign != other) - (sign != other) for other in (_NEW, _OLD)]
    return _Merged(rank, sign, row, (before[0], before[1]))


def _codes(table: Rows) -> Numbers:
    """A number for each row; rows of equal rank and instruction have equal numbers."""
    codes: Numbers = np.unique(np.stack(table.columns()), axis=1, return_inverse=True)[1]
    return codes.ravel()


def _lines(both: Rows, merged: _Merged, shown: Numbers) -> Iterator[str]:
    """The rows `shown` as text, each after its sign."""
    for begin in range(0, len(shown), CHUNK):
        part = shown[begin : begin + CHUNK]
        listed = write_lines(both.take(merged.row[part]), True).decode("ascii").split("\n")
        for sign, line in zip(merged.sign[part].tolist(), listed, strict=False):
            yield _SIGN[sign] + line.strip(" ,")
