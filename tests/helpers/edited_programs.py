"""Programs as bytes, and programs whose rows are reordered, repeated or dropped."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import numpy as np
import pytest
from reference_machine import execute

from schedgen.checker import Memory, check
from schedgen.ir.file import parse, read, write
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile


def written(program: Program) -> bytes:
    """The bytes of the program's file."""
    out = io.BytesIO()
    write(program, out)
    return out.getvalue()


def comes_back(program: Program) -> None:
    """Assert that both readers read the program from its file."""
    file = written(program)
    again, fault = read(io.BytesIO(file), "file")
    assert fault is None
    for other in (again, parse(json.dumps(json.loads(file)), "file")):
        assert all((a == b).all() for a, b in zip(program.rows, other.rows, strict=True))
        assert written(other) == file


def runs_with(memory: Memory, program: Program) -> None:
    """Assert that the reference machine, which trusts nothing, runs the program with these peaks."""
    most = execute(program)
    assert [list(peaks.values()) for peaks in most] == [list(peaks) for peaks in zip(*memory, strict=True)]


def taken(program: Program, order: Sequence[int] | np.ndarray) -> Program:
    """The program with its rows taken in another order, or some twice or not at all; ranks stay together."""
    return Program(program.header, program.rows.take(np.asarray(order, np.int64))).project()


def refused_less_or_twice(program: Program, row: int, place: int) -> None:
    """Assert that `check` refuses the program without `row`, and with `row` repeated at `place`."""
    every = np.arange(len(program))
    for order in (np.delete(every, row), np.insert(every, place, row)):
        with pytest.raises(RefusedFile, match=r"^program:\d+: rank \d+: .* \(rule \d+: "):
            check(taken(program, order))
