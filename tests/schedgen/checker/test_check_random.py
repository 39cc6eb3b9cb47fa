"""`check` on random programs with random damage: nothing missing or doubled passes, and what passes runs."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from schedgen.checker import check
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile


def edited(program, order, rows=None):
    """The program with its rows taken in another order, or some twice or not at all; ranks stay together."""
    rows = (program.rows if rows is None else rows).take(np.asarray(order, np.int64))
    return Program(program.header, rows).project()


@given(st.data())
@settings(max_examples=200)
def test_an_instruction_less_or_twice_is_always_refused(cases, data):
    program = data.draw(cases).compile()
    length = len(program)
    row = data.draw(st.integers(0, length - 1))
    assume(program.rows.op[row] != Op.RECOMPUTE)  # without it, its FWD keeps what the backward needs: all is right
    place = data.draw(st.integers(0, length))
    twice = np.insert(np.arange(length), place, row)
    for order in (np.delete(np.arange(length), row), twice):
        with pytest.raises(RefusedFile, match=r"^program:\d+: rank \d+: .* \(rule [1-7]: "):
            check(edited(program, order))


@given(st.data())
@settings(max_examples=300)
def test_what_is_accepted_runs(cases, runs_if_accepted, data):
    """Swaps and changed operands may do no harm; where `check` accepts them, the program runs to a right end."""
    program = data.draw(cases).compile()
    rows, length = program.rows, len(program)
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, length - 1))
        column = data.draw(st.sampled_from(["order", "next", "rank", "stage", "mb", "peer"]))
        if column in ("order", "next"):
            j = min(i + 1, length - 1) if column == "next" else data.draw(st.integers(0, length - 1))
            order = np.arange(length)
            order[[i, j]] = j, i
            ranks = rows.rank
            rows = rows.take(order)._replace(rank=ranks)
            continue
        values = getattr(rows, column).copy()
        limits = {"rank": program.header.workers, "stage": program.header.stages, "mb": program.header.microbatches}
        if values[i] >= 0 and not (column == "peer" and rows.op[i] in (Op.ALLREDUCE, Op.NORM)):  # groups stay
            limit = limits.get(column, program.header.workers)
            if column == "stage" and rows.kind[i] == Kind.T:
                limit = len(program.header.tied)
            values[i] = data.draw(st.integers(0, limit - 1))
        rows = rows._replace(**{column: values})
    changed = edited(program, np.arange(length), rows)
    runs_if_accepted(changed)
