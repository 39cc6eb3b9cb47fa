"""Rows of cells as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> Iterator[str]:
    """A line for each row, with cells under each other; the first `left` columns are flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(width) if k < left else cell.rjust(width) for k, (cell, width) in cells).rstrip()
