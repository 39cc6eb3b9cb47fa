"""What changed between two schedules: the header by name, then each rank's list as a unified diff."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from schedgen.file import line_of
from schedgen.program import Header, Program


def diff(a: Program, b: Program, a_name: str, b_name: str) -> list[str]:
    """Lines to print; empty where the two are the same. Line numbers are those of the files."""
    lines = [f"{what}: {old} -> {new}" for what, old, new in _headers(a.header, b.header)]
    for rank in range(max(a.header.workers, b.header.workers)):
        (old, first_old), (new, first_new) = (_list(program, rank) for program in (a, b))
        for line in difflib.unified_diff(old, new, f"{a_name} rank {rank}", f"{b_name} rank {rank}", lineterm="", n=2):
            place = re.fullmatch(r"@@ -(\d+)(.*) \+(\d+)(.*) @@", line)
            if place:
                here = f"-{int(place[1]) + first_old - 1}{place[2]} +{int(place[3]) + first_new - 1}{place[4]}"
                line = f"@@ {here} @@"
            lines.append(line)
    return lines


def _list(program: Program, rank: int) -> tuple[list[str], int]:
    """A rank's instructions, and the line of the first."""
    if rank >= program.header.workers:
        return [], 1
    return [str(i) for i in program.instructions(rank)], line_of(program, int(program.bounds[rank]), rank)


def _headers(a: Header, b: Header) -> Iterator[tuple[str, object, object]]:
    for key in dict.fromkeys([*a.scheme, *b.scheme]):
        if a.scheme.get(key) != b.scheme.get(key):
            yield key, a.scheme.get(key), b.scheme.get(key)
    for what in ("mode", "n", "cost", "lowering", "edges", "tied", "owners", "generator"):
        if getattr(a, what) != getattr(b, what):
            yield what, getattr(a, what), getattr(b, what)
    for what in ("weights", "compute"):
        old, new = getattr(a, what), getattr(b, what)
        common = tuple(slice(min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))
        moved = int((old[common] != new[common]).sum())
        if moved:
            yield what, f"{moved} of the jobs that both have", "another worker"
