"""Messages move while ranks compute, and ranks that wait leave the cores to others.

These claims are about time, so each is a ratio within one launch, of medians
over many turns, with a limit far from what is measured: a wait takes about a
tenth of a core, and a message of 16 MiB in flight during a computation of 40 ms
needs no wait afterwards. programs/measure_waits.py measures.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import mpirun
from mpirun.comm.progress_thread import MessageProgress, layers

FASTEST = 2**24 / 20e9  # seconds for 16 MiB through memory: after a shorter wait the message had arrived before


class Wrapped(nn.Module):
    """No nn.Sequential, so that it is traced."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.fixture(scope="module")
def measured(launch) -> dict[str, Any]:
    result = launch(4, program=["-m", "mpi4py", "programs/measure_waits.py"])
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_rank_that_waits_uses_less_than_half_a_core(measured):
    assert len(measured["waiting"]) == 4 and max(measured["waiting"]) < 0.5


@pytest.mark.parametrize("way", ["thread", "layers"])
def test_with_calls_of_mpi_a_message_hides_behind_a_computation(measured, way):
    """At least half of the wait that there is without these calls."""
    if way == "thread" and not measured["works"]:
        pytest.skip("this MPI lets one thread in only")
    transfer, plain, with_calls = (median(measured[what]) for what in ("transfer", "plain", way))
    if plain < max(transfer / 2, FASTEST):
        pytest.skip("this MPI moves messages by itself")
    assert with_calls < plain / 2, measured


@pytest.mark.parametrize("backward", [False, True])
def test_hooks_are_in_layers_that_are_called(backward):
    """A traced stage's graph does not call its layers: it counts as one."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)])
    traced = mpirun.split(Wrapped(net), torch.zeros(4, 2), stages=2).stages[0]
    for module, count in ((net, 8), (traced, 1)):
        polls: list[int] = []
        progress = MessageProgress(MPI.COMM_SELF, lambda polls=polls: polls.append(1))
        outputs: list[torch.Tensor] = []
        act = progress.with_hooks(lambda m=module: outputs.append(m(torch.zeros(4, 2))), module, 1.0, backward)
        assert len(layers(module)) == count
        act()
        outputs[0].sum().backward()
        assert polls
        progress.free()


def test_a_computation_that_fails_leaves_nothing_behind():
    """Neither hooks nor calls in the thread, which `free` waits for."""
    layer, progress = nn.Linear(1, 1), MessageProgress(MPI.COMM_SELF, lambda: None)

    def fail() -> None:
        raise ValueError("thirteen is unlucky")

    for act in (progress.with_hooks(fail, layer, 1.0, backward=False), progress.with_thread(fail)):
        with pytest.raises(ValueError, match="unlucky"):
            act()
    assert not layer._forward_hooks and not progress.computing
    progress.free()
