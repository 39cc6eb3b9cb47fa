"""A short campaign of the fuzzer (`make test-fuzz` runs a long one), and planted bugs of every kind it looks for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from examples import further

HERE = Path(__file__).parents[2] / "helpers"


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own: it may be ended by a limit."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_hostile_input_is_answered(tmp_path):
    process = python("-c", "import fuzz; fuzz.run(100, 2)", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    seen = json.loads(process.stdout)
    assert sum(seen["inputs"].values()) >= 100
    assert set(seen["inputs"]) == {"schedule", "profile", "trace", "option", "actions"}
    assert len(seen["check"]) >= 5 and seen["check"]["accepted"]  # it comes to all parts of the checker


PLANTED = {
    **dict(further(("a_number_that_no_one_bounds", r"(fuzz\.|\w+Error)"))),
    "a_size_that_is_believed": r"fuzz\.Failure: too much memory",
    "a_search_without_end": r"fuzz\.Hang: no answer",
    "an_error_in_the_words_of_the_file": r"fuzz\.Failure: not one sentence",
    "a_hash_that_is_not_compared": r"fuzz\.Failure: a file with the wrong hash is accepted",
    "a_checker_that_accepts_all": r"fuzz\.Failure: (another exit code|\w+ refuses in other words than check)",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """By bug, the exit code and stderr of a campaign."""
    folder = tmp_path_factory.mktemp("planted")
    process = python(str(HERE / "planted.py"), *PLANTED, folder=folder)
    assert process.returncode == 0, process.stderr
    return {bug: (code, (folder / bug).read_text()) for bug, code in json.loads(process.stdout).items()}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, planted):
    code, err = planted[bug]
    if bug != "a_number_that_no_one_bounds" or code != -signal.SIGVTALRM:
        assert code == 1 and re.search(rf"^{PLANTED[bug]}", err, re.M), err


def test_a_loop_that_python_cannot_stop_ends_the_process(tmp_path):
    process = python("-c", "import fuzz\nwith fuzz.limited(0.05): sum(range(10**13))", folder=tmp_path)
    assert process.returncode == -signal.SIGVTALRM and "most recent call first" in process.stderr
