"""A user's mistake ends all ranks with one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MLP = "mpirun.models.mlp:tiny"


@pytest.fixture(scope="module")
def schedule(compiled) -> Path:
    """A schedule of 2 ranks."""
    return compiled("1f1b", stages=2, microbatches=2, workers=2)


@pytest.fixture(scope="module")
def sentence(launch):
    """The one sentence that a launch ends with, after `mpirun: `."""

    def sentence(ranks: int | None, code: int, *arguments: object) -> str:
        result = launch(ranks, *arguments, limit=30)
        assert result.code == code, result
        assert "Traceback" not in result.out + result.err
        assert result.out == ""
        (line,) = result.ours
        return line.removeprefix("mpirun: ")

    return sentence


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_wrong_number_of_ranks(sentence, schedule, ranks):
    found = sentence(ranks, 2, schedule, "--model", MLP)
    assert found.startswith(f"{schedule} is for 2 ranks, mpiexec -n 2, but this run has {ranks}")


def test_no_mpiexec(sentence, schedule):
    found = sentence(None, 2, schedule, "--model", MLP)
    assert found.startswith(f"{schedule} is for 2 ranks, mpiexec -n 2, but this run has 1")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("nowhere:tiny", "cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
        ("mpirun.models.mlp:huge", "mpirun.models.mlp has no function huge"),
        ("models_for_tests:not_a_function", "models_for_tests has no function not_a_function"),
        ("mpirun.models.mlp", "should be MODULE:FUNCTION"),
        ("models_for_tests:one_stage_more", "has 3 stages, but the schedule has 2"),
        ("models_for_tests:returns_a_list", "should return an mpirun.Model, not list"),
        ("models_for_tests:raises", "raises(2) raised ValueError: no such luck"),
    ],
)
def test_a_model_that_is_none(sentence, schedule, text, model, reason):
    assert sentence(2, 2, schedule, "--text", text, "--model", model) == f"--model {model}: {reason}"


def test_stages_that_do_not_fit_each_other(sentence, schedule, text):
    found = sentence(2, 2, schedule, "--text", text, "--model", "models_for_tests:narrow")
    assert re.fullmatch(r"stage 1 fails on the shapes it gets: RuntimeError: .+", found), found


def test_a_loss_that_is_not_one_number(sentence, schedule, text):
    found = sentence(2, 2, schedule, "--text", text, "--model", "models_for_tests:loss_of_many")
    assert found == "the loss should be one number"


def test_a_stage_that_is_no_module(sentence, schedule, text):
    found = sentence(2, 2, schedule, "--text", text, "--model", "models_for_tests:no_module")
    assert found == "stage 1 of the model should be an nn.Module, not function"


def test_a_stage_of_two_types(sentence, schedule, text):
    """Only one rank builds the stage; the other must learn of it."""
    found = sentence(2, 2, schedule, "--text", text, "--model", "models_for_tests:two_types")
    assert found.startswith("stage 1: parameters of one stage must have one type, not ")


def test_a_batch_that_raises(sentence, schedule, text):
    found = sentence(2, 2, schedule, "--text", text, "--model", "models_for_tests:batch_raises")
    assert "ValueError: no such batch" in found


def test_a_text_that_is_missing(sentence, schedule, tmp_path):
    missing = tmp_path / "text"
    assert sentence(2, 2, schedule, "--model", MLP, "--text", missing) == f"--text {missing}: No such file or directory"


def test_a_text_that_is_too_short(sentence, schedule, tmp_path):
    short = tmp_path / "text"
    short.write_bytes(b"x" * 16)
    found = sentence(2, 2, schedule, "--model", MLP, "--text", short)
    assert found == f"{short}: 16 bytes are too short a text, the model needs 17"  # 16 of context and 1 to guess


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", MLP, "--steps", "x"], "argument --steps: 'x' is no whole number of at least 0"),
        (["--model", MLP, "--lr", "0"], "argument --lr: '0' is no positive number"),
        (["--model", MLP, "--nonsense"], "unrecognized arguments: --nonsense"),
        ([], "--model is missing"),
    ],
)
def test_options_that_are_wrong(sentence, schedule, arguments, reason):
    assert sentence(2, 2, schedule, *arguments) == f"{reason} (see python -m mpirun --help)"


def test_no_schedule(sentence):
    assert sentence(2, 2, "--model", MLP) == "FILE is missing (see python -m mpirun --help)"


def test_metrics_into_a_folder_that_is_missing(sentence, schedule, text, tmp_path):
    file = tmp_path / "nowhere" / "metrics"
    found = sentence(2, 2, schedule, "--model", MLP, "--text", text, "--metrics", file)
    assert found == f"--metrics {file}: No such file or directory"


def test_a_schedule_that_is_missing(sentence, tmp_path):
    missing = tmp_path / "schedule.json"
    assert sentence(2, 1, missing, "--model", MLP) == f"{missing}: No such file or directory"


def test_a_schedule_that_is_a_folder(sentence, tmp_path):
    assert sentence(2, 1, tmp_path, "--model", MLP) == f"{tmp_path}: Is a directory"


def change_a_job(data: bytes) -> bytes:
    return data.replace(b'{"op": "FWD", "stage": 1, "mb": 1}', b'{"op": "FWD", "stage": 1, "mb": 0}')


def change_the_generator(data: bytes) -> bytes:
    """A byte that means nothing to a run: only the hash can tell."""
    return data.replace(b'"generator": "schedgen', b'"generator": "schedgem')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", ":1: the file ends here, before its end"),
        (change_a_job, r":\d+: .*"),
        (change_the_generator, r":\d+: the SHA-256 does not match the lines above: the file was damaged or edited"),
        (
            lambda data: data.replace(b'{"schedgen": 1,', b'{"schedgen": 2,'),
            r":1: format version 2 is newer than this schedgen reads \(1\)",
        ),
    ],
    ids=["empty", "one byte of a job", "one byte of the header", "from a newer version"],
)
def test_a_schedule_that_is_damaged(sentence, schedule, tmp_path, damage, reason):
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(damage(schedule.read_bytes()))
    assert damaged.read_bytes() != schedule.read_bytes()
    found = sentence(2, 1, damaged, "--model", MLP)
    assert re.fullmatch(re.escape(str(damaged)) + reason, found), found


def test_help_is_no_mistake(launch):
    result = launch(None, "--help")
    assert (result.code, result.err) == (0, "")
    for option in ("--model", "--steps", "--text", "--seed", "--verify", "--canonical", "--metrics"):
        assert option in result.out
