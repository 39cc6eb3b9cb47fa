"""--metrics: a row a step, in a file or on standard output, and what a run does that cannot write its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def command(compiled, text) -> list[object]:
    """The arguments of a run on one rank."""
    schedule = compiled("gpipe", stages=1, microbatches=2, workers=1)
    return [schedule, "--model", "mpirun.examples.mlp:tiny", "--text", text]


def steps(text: str) -> list[int]:
    """The steps of the rows in a text, which has other lines, too."""
    return [json.loads(line)["step"] for line in text.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def saved(several, command, tmp_path_factory) -> Path:
    """A folder with a checkpoint of step 2, and the rows of the first two steps."""
    folder = tmp_path_factory.mktemp("saved")
    ((code, _),) = several(1, [[*command, "--steps", 2, "--save", folder / "saved", "--metrics", folder / "rows"]])
    assert code == 0 and steps((folder / "rows").read_text()) == [0, 1]
    return folder


def test_a_run_that_goes_on_keeps_the_rows_of_steps_that_are_done(mistakes, command, saved):
    """Those of a step that will be done again are dropped, and one that a kill has cut."""
    rows = saved / "rows"
    rows.write_text(rows.read_text() + '{"step": 2}\n{"ste')
    again = [*command, "--resume", saved / "saved", "--metrics", rows, "--steps"]
    for count in (2, 4):  # first no step is left to do, then two are
        (ended,) = mistakes(1, [[*again, count]])
        assert (ended.code, ended.err) == (0, "")
        assert steps(rows.read_text()) == [*range(count)]


def test_rows_go_to_standard_output_behind_what_is_there(mistakes, command, saved):
    (resumed,) = mistakes(1, [[*command, "--steps", 4, "--resume", saved / "saved", "--metrics", "-"]])
    assert resumed.code == 0 and steps(resumed.out) == [2, 3]
    assert [line.split()[0] for line in resumed.out.splitlines()[::2]] == ["resumed", '{"step":', '{"step":']


def test_rows_that_cannot_be_written_cost_no_step(mistakes, command, tmp_path):
    run = [*command, "--steps", 3, "--save", tmp_path / "saved", "--metrics", "/dev/full"]
    (ended,) = mistakes(1, [run])
    note = "mpirun: note: --metrics /dev/full: No space left on device: no more is written to it\n"
    assert (ended.code, ended.err) == (1, note)
    assert "step 3/3" in ended.out and "checkpoint of step 3: " in ended.out
