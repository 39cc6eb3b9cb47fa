"""Trainings where the device works ahead of MPI: on one that is late on purpose, and on GPUs where there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TRACES = Path(__file__).parents[2] / "traces"
GOLDEN = sorted(path.stem for path in TRACES.glob("*.json") if "tied" not in path.stem)
LATE = [(name, how) for name in ("1f1b", "fsdp", "ddp", "fslpp", "zb-v") for how in ("direct", "staged")]


@pytest.fixture(scope="module")
def late_runs(inside, text):
    """Trainings on a device whose work is done late, with messages straight from its memory and through host memory."""
    common = ["--model", "mpirun.models.mlp:tiny", "--text", text, "--steps", 3, "--verify", "--canonical"]
    runs = [{"arguments": [TRACES / f"{name}.json", *common], "late": how} for name, how in LATE]
    return dict(zip(LATE, inside(4, runs), strict=True))


@pytest.mark.parametrize(("name", "how"), LATE)
def test_a_late_device_gives_the_bits_of_one_process(late_runs, name, how):
    assert late_runs[name, how].differences == {"losses": 0, "gradients": 0, "parameters": 0}
    assert late_runs[name, how].code == 0


@pytest.fixture(scope="module")
def gpu_runs(several, text):
    common = ["--model", "mpirun.models.gpt:tiny", "--text", text, "--steps", 3, "--clip", 1, "--verify"]
    runs = [[TRACES / f"{name}.json", *common, "--device", "cuda"] for name in GOLDEN]
    return dict(zip(GOLDEN, several(4, runs), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("name", GOLDEN)
def test_the_gradient_on_gpus_is_that_of_one_gpu(gpu_runs, name):
    """Ranks share GPUs where there are fewer."""
    code, out = gpu_runs[name]
    assert code == 0, out
    assert "device: " in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_a_gpu_that_is_missing_is_a_users_mistake(mistakes):
    (ended,) = mistakes(1, [[TRACES / "1f1b.json", "--model", "mpirun.models.mlp:tiny", "--device", "cuda"]])
    assert ended.code == 2
