"""A rank that fails takes the whole job along, at once and with one message that says where."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

# In 1f1b stage 2 is on rank 2; its 13th forward is that of microbatch 4 in the second step.
RANK, INSTRUCTION = 2, '{"op": "FWD", "stage": 2, "mb": 4}'
RAISED = {
    "raises_in_stage": "RuntimeError: thirteen is unlucky",
    "exits_in_stage": "SystemExit: thirteen is enough",
}


class Failure(NamedTuple):
    model: str
    result: object  # of the launch
    seconds: float  # from the trouble to the end of mpiexec


@pytest.fixture(scope="module", params=[*RAISED, "killed_in_stage"])
def failure(launch, traces, text, tmp_path_factory, request) -> Failure:
    """A launch of 4 ranks in which a stage of the model makes trouble."""
    note = tmp_path_factory.mktemp("trouble") / "at"
    command = [traces / "1f1b.json", "--model", f"models_for_tests:{request.param}", "--text", text, "--steps", 5]
    result = launch(4, *command, env={"TROUBLE_AT": str(note)}, limit=30)
    return Failure(request.param, result, result.ended - float(note.read_text()))


def test_the_job_ends_within_10_seconds_and_not_well(failure):
    assert failure.seconds < 10
    assert failure.result.code != 0


def test_no_process_is_left_behind(failure, left_behind):
    assert left_behind(failure.result) == []


def test_it_happened_in_the_second_step(failure):
    assert "step 1/5" in failure.result.out and "step 2/5" not in failure.result.out


def test_the_end_is_explained(failure, traces):
    """By rank, line, instruction and reason; one that is killed cannot speak, and mpiexec does it."""
    result = failure.result
    assert "Traceback" not in result.err
    if failure.model not in RAISED:
        assert result.ours == []
        assert "signal 9" in result.out + result.err
        return
    assert result.code == 1
    (message,) = result.ours
    found = re.fullmatch(r"mpirun: rank (\d) on \S+: line (\d+): (\{.*?\}): (.*) \(at (\S+):\d+\)", message)
    assert found is not None, message
    rank, line, instruction, reason, place = found.groups()
    assert (int(rank), instruction, reason) == (RANK, INSTRUCTION, RAISED[failure.model])
    assert (traces / "1f1b.json").read_text().splitlines()[int(line) - 1].strip(" ,") == INSTRUCTION
    assert place.endswith("models_for_tests.py")
