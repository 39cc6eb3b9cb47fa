"""Trainings where the device works ahead of MPI: on one that is late on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TRACES = Path(__file__).parents[3] / "traces"
GOLDEN = sorted(path.stem for path in TRACES.glob("*.json"))
MODEL = dict.fromkeys(GOLDEN, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}
LATE = [(name, how) for name in ("1f1b", "fslpp", "ddp") for how in ("direct", "staged")]
LATE += [("fsdp", "direct"), ("zb-v", "staged"), ("1f1b-tied", "direct"), ("1f1b-tensor", "staged")]
LATE += [("pipedream", "direct")]


@pytest.fixture(scope="module")
def late_runs(inside, text):
    """Trainings on a device whose work is done late, with messages straight from its memory and through host memory."""
    common = ["--text", text, "--steps", 2, "--verify", "--canonical"]
    runs = [
        {"arguments": [TRACES / f"{name}.json", "--model", MODEL[name], *common], "late": how} for name, how in LATE
    ]
    return dict(zip(LATE, inside(4, runs), strict=True))


@pytest.mark.parametrize(("name", "how"), LATE)
def test_a_late_device_gives_the_bits_of_one_process(late_runs, name, how):
    assert late_runs[name, how].differences == {"losses": 0, "gradients": 0, "parameters": 0}
    assert late_runs[name, how].code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_a_gpu_that_is_missing_is_a_users_mistake(mistakes):
    (ended,) = mistakes(4, [[TRACES / "1f1b.json", "--model", MODEL["1f1b"], "--device", "cuda"]])
    assert ended == (2, "", "mpirun: --device cuda: torch finds no GPU on every host\n")
