"""What changed between two schedules: the header by name, then each rank's list as a unified diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from schedgen.program import Header, Program


def diff(a: Program, b: Program, a_name: str, b_name: str) -> list[str]:
    """Lines to print; empty where the two are the same."""
    lines = [f"{what}: {old} -> {new}" for what, old, new in _headers(a.header, b.header)]
    for rank in range(max(a.header.workers, b.header.workers)):
        old, new = (
            [str(i) for i in program.instructions(rank)] if rank < program.header.workers else [] for program in (a, b)
        )
        lines += difflib.unified_diff(old, new, f"{a_name} rank {rank}", f"{b_name} rank {rank}", lineterm="", n=2)
    return lines


def _headers(a: Header, b: Header) -> Iterator[tuple[str, object, object]]:
    for key in dict.fromkeys([*a.scheme, *b.scheme]):
        if a.scheme.get(key) != b.scheme.get(key):
            yield key, a.scheme.get(key), b.scheme.get(key)
    for what in ("mode", "n", "cost", "lowering", "edges", "owners", "generator"):
        if getattr(a, what) != getattr(b, what):
            yield what, getattr(a, what), getattr(b, what)
    if a.compute.shape != b.compute.shape or (a.compute != b.compute).any():
        yield "compute", "placement differs", ""
    if a.weights.shape != b.weights.shape or (a.weights != b.weights).any():
        yield "weights", "placement differs", ""
