"""Training scripts say how they are used."""

from __future__ import annotations

import re

import pytest


@pytest.mark.parametrize(
    ("example", "words"), [("finetune_lm", ["model"]), ("digits", ["1.json", "x"]), ("byte_lm", [])]
)
def test_an_example_says_how_it_is_used(in_one_launch, example, words):
    ((code, _, err),) = in_one_launch(1, [[f"mpirun.examples.{example}", *words]])
    assert code == 2 and re.search("^usage: ", err, re.M) and "Traceback" not in err
