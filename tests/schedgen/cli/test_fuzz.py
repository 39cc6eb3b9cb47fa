"""Hostile input is answered in one sentence (`make test-fuzz` tries 100,000)."""

from __future__ import annotations

import functools

import fuzz
import pytest
from examples import examples
from hypothesis import given, settings

import schedgen.cli.main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    parser = schedgen.cli.main.parser
    schedgen.cli.main.parser = functools.cache(parser)  # making it takes longer than most answers
    yield fuzz.Range(tmp_path_factory.mktemp("fuzz"))
    schedgen.cli.main.parser = parser


BASES = 12 + len(fuzz.GOLDEN)


@given(case=fuzz.cases(BASES))
@settings(max_examples=examples(400, as_asked=True))
def test_hostile_input_is_answered(place, case):
    place.run(case)
