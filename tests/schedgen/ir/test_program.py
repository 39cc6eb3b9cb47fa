"""`Program.insert` against insertion into a Python list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import compiled

from schedgen.ir.instructions import Op
from schedgen.ir.program import rows
from schedgen.schemes.scheme import Sizes

SIZES = Sizes(4, 40, 4)
PROGRAM = compiled("1f1b", SIZES)
LAST = len(PROGRAM) - 1
AFTER = {
    "nowhere": [],
    "at the end": [LAST, LAST, LAST],
    "at the front and at two places": [-1, 6, 6, 4, -1],
    "at many places": np.random.default_rng(0).integers(-1, LAST + 1, LAST // 2),
}


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("where", AFTER)
def test_rows_are_inserted_as_into_a_list(where, timed):
    program, after = PROGRAM, np.array(AFTER[where], np.int64)
    new = rows(Op.NORM, np.zeros(len(after), np.int32), group=np.arange(len(after)))
    before = replace(program, time=np.arange(LAST + 1, dtype=np.float64) if timed else None)
    found = before.insert(new, after=after)

    old, inserted = (list(zip(*(column.tolist() for column in table), strict=True)) for table in (program.rows, new))
    expected = []
    for row in range(-1, LAST + 1):
        expected += [(old[row], float(row))] if row >= 0 else []
        expected += [(inserted[k], float(max(row, 0))) for k in np.flatnonzero(after == row).tolist()]
    assert len(expected) == LAST + 1 + len(after)
    assert list(zip(*(column.tolist() for column in found.rows), strict=True)) == [row for row, _ in expected]
    assert (found.time is None) == (not timed)
    if timed:
        assert found.time.tolist() == [time for _, time in expected]
