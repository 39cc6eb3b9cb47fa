"""`check` on random programs: nothing missing or doubled passes."""

from __future__ import annotations

import fuzz_check
import hypothesis.strategies as st
from edited_programs import refused_less_or_twice
from examples import examples
from hypothesis import assume, given, settings

from schedgen.analysis import analyse
from schedgen.ir.instructions import Op


@given(st.data())
@settings(max_examples=examples(200))
def test_an_instruction_less_or_twice_is_always_refused(cases, data):
    program = data.draw(cases).compile()
    row = data.draw(st.integers(0, len(program) - 1))
    assume(program.rows.op[row] != Op.RECOMPUTE)  # without it, its FWD keeps what the backward needs: all is right
    refused_less_or_twice(program, row, data.draw(st.integers(0, len(program))))


def test_mutants_that_are_accepted_run_on_the_reference_machine(monkeypatch, tmp_path):
    """A short campaign; `make test-check` runs a long one."""
    monkeypatch.chdir(tmp_path)  # where files that are accepted and wrong would be left
    tally, _ = fuzz_check.campaign(60, "right")
    assert not tally["accepted and wrong"]
    assert tally["accepted and right"] > 5 and tally["refused and wrong"] > 5
    monkeypatch.setattr(fuzz_check, "check", lambda program: analyse(program).memory)  # accepts everything
    tally, _ = fuzz_check.campaign(60, "right")
    assert tally["accepted and wrong"] > 5
