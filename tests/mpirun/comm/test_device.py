"""What a run does where there is no GPU."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_a_gpu_that_is_missing_is_a_users_mistake(mistakes, traces):
    (ended,) = mistakes(4, [[traces / "1f1b.json", "--model", "mpirun.examples.mlp:tiny", "--device", "cuda"]])
    refused = r"mpirun: device cuda: torch finds no GPU for rank 0 on \S+\n"
    assert ended[:2] == (2, "") and re.fullmatch(refused, ended.err), ended.err


LACKING = """
from unittest import mock
from mpi4py import MPI
from mpirun.comm.device import choose_device
comm = MPI.COMM_WORLD
with mock.patch("torch.cuda.is_available", lambda: comm.rank == 0):
    for name in ("auto", "cpu"):
        assert choose_device(comm, name, "auto").kind == "cpu"
"""


def test_a_host_without_its_gpu_is_named(scripts):
    """As if a driver had failed on one of many hosts."""
    (done,) = scripts(2, [[LACKING]])
    note = r"mpirun: note: torch finds a GPU for some ranks, but none for rank 1 on \S+: all take CPUs\n"
    assert done.code == 0 and re.fullmatch(note, done.err), done.err


@pytest.mark.parametrize("program", ["gpu_delays", "late_kernels"])
def test_what_programs_for_gpus_put_something_in_place_of_is_there(program, monkeypatch):
    """No other test imports these programs without a GPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "helpers" / "programs")
    importlib.import_module(program)
