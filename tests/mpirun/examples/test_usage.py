"""Training scripts say how they are used."""

from __future__ import annotations

import re

import pytest
from examples import further


@pytest.mark.parametrize(
    ("example", "words"), [("finetune_lm", ["model"]), ("digits", ["1.json", "x"]), ("byte_lm", [])]
)
def test_an_example_says_how_it_is_used(in_one_launch, example, words):
    ((code, _, err),) = in_one_launch(1, [[f"mpirun.examples.{example}", *words]])
    assert code == 2 and re.search("^usage: ", err, re.M) and "Traceback" not in err


@pytest.mark.parametrize("scheme", further("1f1b", "ddp"))
def test_digits_are_told_apart_and_a_run_that_goes_on_has_the_same_bits(execute, tmp_path, scheme):
    script = """
from mpirun.examples import digits
options = {"stages": 2, "microbatches": 4, "canonical": True, "timeout": 0}
(first,), (again,) = (digits.main(sys.argv[2], 1, sys.argv[1], **options) for _ in range(2))
assert first == again > 0.5, (first, again)
"""
    assert "resumed after step " in execute(2, script, tmp_path, scheme).out
