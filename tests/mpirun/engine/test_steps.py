"""Training lowers the loss, reports what it did, and gives the same bits again."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from run_results import metrics

GPT, SMALL = "mpirun.examples.gpt:tiny", "models_for_graphs:gpt_of_four"
STEPS = 10
AGAIN = ("fslpp", "lpp")  # ranks send activations, and add gradients; and sum them over owners


def rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(file: Path) -> list[tuple[float, ...]]:
    """Loss and gradient norm of every step."""
    return metrics(file, "loss", "grad_norm")


@pytest.fixture(scope="module")
def long(several, traces, tmp_path_factory):
    """A training on the default text: its stdout and its metrics."""
    file = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    ((code, out),) = several(
        4, [[traces / "1f1b.json", "--model", GPT, "--steps", STEPS, "--clip", 1, "--metrics", file]]
    )
    assert code == 0, out
    return out, file


@pytest.fixture(scope="module")
def short(several, traces, text, tmp_path_factory):
    """Short trainings on the small text: exit code and stdout, and the metrics, by name.

    Those called `again` are of a second launch.
    """
    folder = tmp_path_factory.mktemp("metrics")
    runs = {
        **{name: [f"{name}.json"] for name in AGAIN},
        "seed 1": ["fslpp.json", "--seed", 1],
        "clipped": ["fslpp.json", "--clip", 0.1],
        **{f"{name} again": [f"{name}.json"] for name in AGAIN},
    }
    common = ["--model", SMALL, "--text", text, "--steps", 2, "--metrics"]
    commands = [[traces / name, *more, *common, folder / run] for run, (name, *more) in runs.items()]
    done = several(4, commands[: -len(AGAIN)]) + several(4, commands[-len(AGAIN) :], fresh=True)
    return dict(zip(runs, done, strict=True)), folder


def test_the_loss_falls(long):
    _, file = long
    losses = [row["loss"] for row in rows(file)]
    assert losses[0] - losses[-1] > 1.0  # nats; it begins near ln 256 = 5.5
    assert abs(losses[0] - math.log(256)) < 1.0


def test_metrics_have_one_object_a_step(long):
    _, file = long
    steps = rows(file)
    assert [row["step"] for row in steps] == list(range(STEPS))
    for row in steps:
        assert set(row) == {"step", "loss", "grad_norm", "seconds", "tokens"}
        assert row["tokens"] == 8 * 4 * 64  # microbatches, sequences, bytes of gpt.tiny
        assert row["seconds"] > 0 and row["grad_norm"] > 0


def test_stdout_says_what_the_metrics_say(long):
    out, file = long
    losses = [row["loss"] for row in rows(file)]
    assert f"step {STEPS}/{STEPS}  loss {losses[-1]:.4f}" in out
    summary = out.splitlines()[-1]
    assert re.match(rf"1f1b: {STEPS} steps on 4 ranks, loss {losses[0]:.4f} -> {losses[-1]:.4f}, \d+ tokens/s", summary)


@pytest.mark.parametrize("name", AGAIN)
def test_two_launches_give_the_same_bits(short, name):
    done, folder = short
    assert done[name][0] == done[f"{name} again"][0] == 0
    assert len(numbers(folder / name)) == 2
    assert numbers(folder / name) == numbers(folder / f"{name} again")


def test_another_seed_gives_other_losses(short):
    done, folder = short
    assert done["seed 1"][0] == 0
    for (loss, _), (other, _) in zip(numbers(folder / "fslpp"), numbers(folder / "seed 1"), strict=True):
        assert loss != other


def test_clip_limits_the_step_not_the_norm_that_is_told(short):
    done, folder = short
    assert done["clipped"][0] == 0
    free, clipped = numbers(folder / "fslpp"), numbers(folder / "clipped")
    assert free[0] == clipped[0]  # both before the first step
    assert clipped[0][1] > 0.1
    assert free[-1] != clipped[-1]
