"""Rows of cells as lines of text, and bytes in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> Iterator[str]:
    """A line for each row, with cells under each other; the first `left` columns are flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(width) if k < left else cell.rjust(width) for k, (cell, width) in cells).rstrip()


def short_bytes(count: float) -> str:
    """A number of bytes to three digits, as in 12.3 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
