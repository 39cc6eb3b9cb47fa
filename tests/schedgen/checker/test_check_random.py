"""`check` on random programs: nothing missing or doubled passes."""

from __future__ import annotations

import fuzz_check
import hypothesis.strategies as st
import numpy as np
import pytest
from examples import examples
from hypothesis import assume, given, settings

from schedgen.analysis import analyse
from schedgen.checker import check
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile


def edited(program, order, rows=None):
    """The program with its rows taken in another order, or some twice or not at all; ranks stay together."""
    rows = (program.rows if rows is None else rows).take(np.asarray(order, np.int64))
    return Program(program.header, rows).project()


@given(st.data())
@settings(max_examples=examples(200))
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


def test_mutants_that_are_accepted_run_on_the_reference_machine(monkeypatch, tmp_path):
    """A short campaign; `make test-check` runs a long one."""
    monkeypatch.chdir(tmp_path)  # where files that are accepted and wrong would be left
    tally, _ = fuzz_check.campaign(60, "right")
    assert not tally["accepted and wrong"]
    assert tally["accepted and right"] > 5 and tally["refused and wrong"] > 5
    monkeypatch.setattr(fuzz_check, "check", lambda program: analyse(program).memory)  # accepts everything
    tally, _ = fuzz_check.campaign(60, "right")
    assert tally["accepted and wrong"] > 5
