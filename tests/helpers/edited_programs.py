"""Programs as bytes, and programs whose rows are reordered, repeated or dropped."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest

from schedgen.checker import check
from schedgen.ir.file import write
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile


def written(program: Program) -> bytes:
    """The bytes of the program's file."""
    out = io.BytesIO()
    write(program, out)
    return out.getvalue()


def taken(program: Program, order: Sequence[int] | np.ndarray) -> Program:
    """The program with its rows taken in another order, or some twice or not at all; ranks stay together."""
    return Program(program.header, program.rows.take(np.asarray(order, np.int64))).project()


def refused_less_or_twice(program: Program, row: int, place: int, rules: str = "1-7") -> None:
    """Assert that `check` refuses the program by one of `rules` without `row`, and with `row` repeated at `place`."""
    every = np.arange(len(program))
    for order in (np.delete(every, row), np.insert(every, place, row)):
        with pytest.raises(RefusedFile, match=rf"^program:\d+: rank \d+: .* \(rule [{rules}]: "):
            check(taken(program, order))
