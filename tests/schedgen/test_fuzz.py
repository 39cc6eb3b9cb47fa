"""A short campaign of the fuzzer, `make test-fuzz` runs a long one; and bugs of every kind it looks for, planted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

import schedgen.cli
import schedgen.decode
import schedgen.file
import schedgen.kernels
from schedgen.errors import RefusedFile


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What a campaign changes in the process."""
    monkeypatch.setattr(schedgen.kernels, "SMALL", schedgen.kernels.SMALL)
    monkeypatch.setattr(schedgen.cli, "_parser", schedgen.cli._parser)


def test_hostile_input_is_answered(tmp_path):
    tally = fuzz.campaign(150, 1, tmp_path)
    assert sum(tally.inputs.values()) >= 150 and set(tally.inputs) == {
        "schedule",
        "profile",
        "trace",
        "option",
        "actions",
    }
    assert len(tally.reasons) >= 5 and tally.reasons["accepted"]  # it comes to all parts of the checker


def a_number_that_no_one_bounds(monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 1.0)  # some make writing endless
    monkeypatch.setattr(schedgen.decode, "_number", lambda value, *_: value)


def a_size_that_is_believed(monkeypatch):
    header = schedgen.decode.header
    monkeypatch.setattr(schedgen.decode, "MOST_PAIRS", 10**30)
    monkeypatch.setattr(schedgen.file, "decode_header", lambda raw, bounds, jobs: header(raw, bounds, 10**30))


def a_search_without_end(monkeypatch):
    def search(*_):
        while True:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.5)
    monkeypatch.setattr(schedgen.file, "_key_line", search)


def an_error_in_the_words_of_the_file(monkeypatch):
    monkeypatch.setattr(schedgen.cli, "one_line", str)


def a_hash_that_is_not_compared(monkeypatch):
    read = schedgen.cli.read
    monkeypatch.setattr(schedgen.cli, "read", lambda *given: (read(*given)[0], None))


def a_checker_that_accepts_all(monkeypatch):
    monkeypatch.setattr(schedgen.cli, "check", lambda *_: None)


PLANTED = (
    (a_number_that_no_one_bounds, (fuzz.Failure, LookupError, ArithmeticError, TypeError, ValueError), None),
    (a_size_that_is_believed, fuzz.Failure, "too much memory"),
    (a_search_without_end, fuzz.Hang, "no answer"),
    (an_error_in_the_words_of_the_file, fuzz.Failure, "not one sentence"),
    (a_hash_that_is_not_compared, fuzz.Failure, "the wrong hash is accepted"),
    (a_checker_that_accepts_all, fuzz.Failure, "another exit code"),
)


@pytest.mark.parametrize(("plant", "error", "words"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_bug_is_found(plant, error, words, monkeypatch, tmp_path):
    plant(monkeypatch)
    with pytest.raises(error, match=words) as found:
        fuzz.campaign(1500, 2, tmp_path, shrink=False)
    assert not isinstance(found.value, RefusedFile)


def test_a_loop_that_python_cannot_stop_ends_the_process():
    code = "import fuzz\nwith fuzz.limited(0.05): sum(range(10**13))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert process.returncode == -signal.SIGXCPU and "most recent call first" in process.stderr
