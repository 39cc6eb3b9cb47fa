"""A rank that fails takes the whole job along, at once and with one message that says where."""

from __future__ import annotations

import re

import pytest

# In 1f1b stage 2 is on rank 2; its 13th forward is that of microbatch 4 in the second step.
RANK, INSTRUCTION = 2, '{"op": "FWD", "stage": 2, "mb": 4}'


@pytest.fixture(scope="module")
def failed(launch, traces, text, tmp_path_factory, request):
    """A launch in which a model's stage makes trouble, and the seconds from there to the end of mpiexec."""
    note = tmp_path_factory.mktemp("trouble") / "at"
    model = f"models_for_tests:{request.param}"
    command = [traces / "1f1b.json", "--model", model, "--text", text, "--steps", 5]
    result = launch(4, *command, env={"TROUBLE_AT": str(note)}, limit=30)
    return result, result.ended - float(note.read_text())


ALL = pytest.mark.parametrize("failed", ["raises_in_stage", "exits_in_stage", "killed_in_stage"], indirect=True)


@ALL
def test_the_job_ends_within_10_seconds_and_not_well(failed):
    result, seconds = failed
    assert seconds < 10
    assert result.code != 0


@ALL
def test_no_process_is_left_behind(failed, left_behind):
    result, _ = failed
    assert left_behind(result) == []


@ALL
def test_it_happened_in_the_second_step(failed):
    result, _ = failed
    assert "step 1/5" in result.out and "step 2/5" not in result.out


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        ("raises_in_stage", "RuntimeError: thirteen is unlucky"),
        ("exits_in_stage", "SystemExit: thirteen is enough"),
    ],
    indirect=["failed"],
)
def test_one_message_names_rank_line_instruction_and_reason(failed, traces, reason):
    result, _ = failed
    assert result.code == 1
    assert "Traceback" not in result.err
    (message,) = result.ours
    found = re.fullmatch(r"mpirun: rank (\d) on \S+: line (\d+): (\{.*?\}): (.*) \(at (\S+):\d+\)", message)
    assert found is not None, message
    rank, line, instruction, what, place = found.groups()
    assert (int(rank), instruction, what) == (RANK, INSTRUCTION, reason)
    assert (traces / "1f1b.json").read_text().splitlines()[int(line) - 1].strip(" ,") == INSTRUCTION
    assert place.endswith("models_for_tests.py")
