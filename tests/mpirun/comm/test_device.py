"""What a run does where there is no GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_a_gpu_that_is_missing_is_a_users_mistake(mistakes, traces):
    (ended,) = mistakes(4, [[traces / "1f1b.json", "--model", "mpirun.examples.mlp:tiny", "--device", "cuda"]])
    assert ended == (2, "", "mpirun: --device cuda: torch finds no GPU on every host\n")
