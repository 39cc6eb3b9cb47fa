"""Hostile input is answered in one sentence (`make test-fuzz` tries 100,000), and planted bugs are found."""

from __future__ import annotations

import functools

import fuzz
import pytest
from examples import examples, further
from hypothesis import HealthCheck, Phase, given, settings

import schedgen.checker
import schedgen.cli.main
import schedgen.ir.file
import schedgen.ir.limits
import schedgen.ir.validate_header
import schedgen.util.option_fields


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


def a_size_that_is_believed(patch):
    header = schedgen.ir.validate_header.read_header
    patch.setattr(schedgen.ir.limits, "MOST_PAIRS", 10**30)
    patch.setattr(schedgen.ir.file, "read_header", lambda raw, limits, jobs: header(raw, limits, 10**30))


def a_search_without_end(patch):
    def search(*_):
        while True:
            pass

    patch.setattr(fuzz, "SECONDS", 0.5)
    patch.setattr(schedgen.ir.file, "_key_line", search)


def an_error_in_the_words_of_the_file(patch):
    for module in (schedgen.cli.main, schedgen.util.option_fields):
        patch.setattr(module, "one_line", str)


def a_hash_that_is_not_compared(patch):
    read = schedgen.checker.read
    patch.setattr(schedgen.checker, "read", lambda *arguments: (read(*arguments)[0], None))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (a_hash_that_is_not_compared, "a file with the wrong hash is accepted"),
        *further(
            (a_size_that_is_believed, "too much memory|not what writing makes"),
            (a_search_without_end, "no answer"),
            (an_error_in_the_words_of_the_file, "not one sentence"),
        ),
    ],
)
def test_a_planted_bug_is_found(plant, words, place, monkeypatch):
    plant(monkeypatch)

    @given(case=fuzz.cases(BASES))
    @settings(max_examples=1500, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def campaign(case):
        place.run(case)

    with pytest.raises(fuzz.Failure, match=words):
        campaign()
