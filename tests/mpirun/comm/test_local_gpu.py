"""The GPU of a rank is made current before MPI starts; here CUDA's driver is a stand-in that records its calls."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mpirun.comm.local_gpu import LOCAL_RANK, local_rank, use_local_gpu


class Driver:
    """A driver with so many GPUs, which records the GPU of the current context."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.current = gpus, -1

    def cuInit(self, flags: int) -> int:
        return 0 if self.gpus else 100

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return int(number >= self.gpus)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = 1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current = (context.value or 0) - 1000
        return 0


@pytest.fixture
def gpu_of(monkeypatch):
    """The GPU that a rank with such variables and arguments takes; -1: none."""

    def gpu_of(gpus: int, *arguments: str, **variables: str) -> int:
        driver = Driver(gpus)
        for name in LOCAL_RANK:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        use_local_gpu(arguments)
        return driver.current

    return gpu_of


def test_ranks_take_the_gpus_of_their_host_in_turns(gpu_of):
    assert [gpu_of(4, SLURM_LOCALID=str(rank)) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert gpu_of(1, OMPI_COMM_WORLD_LOCAL_RANK="3") == 0


def test_none_is_taken_without_a_launcher_without_gpus_or_for_what_needs_none(gpu_of):
    assert gpu_of(4) == gpu_of(0, MPI_LOCALRANKID="1") == -1
    assert gpu_of(4, "1f1b.json", "--device", "cpu", MPI_LOCALRANKID="1") == -1
    assert gpu_of(4, "graph", "--stages", "2", MPI_LOCALRANKID="1") == gpu_of(4, "--help", MPI_LOCALRANKID="1") == -1
    assert gpu_of(4, "1f1b.json", "--device=cuda", MPI_LOCALRANKID="1") == 1


def test_mpiexec_in_a_job_of_slurm_knows_better(gpu_of):
    """Its ranks inherit the number of the one process that Slurm has started."""
    assert gpu_of(4, SLURM_LOCALID="0", MPI_LOCALRANKID="2") == 2
    assert local_rank({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}) == 3


NUMBER = """
import os, sys
from mpi4py import MPI
from mpirun.comm.device import number_on_host
from mpirun.comm.local_gpu import LOCAL_RANK, local_rank
comm, said = MPI.COMM_WORLD, [local_rank(os.environ), number_on_host(MPI.COMM_WORLD)]
half = comm.Split(comm.rank // 2)
said.append(number_on_host(half))  # of another Engine, which should not take the same GPUs
for name in LOCAL_RANK:
    os.environ.pop(name, None)
said.append(number_on_host(comm))
os.environ[LOCAL_RANK[-1]] = "0"  # inherited by all
said.append(number_on_host(comm))
sys.stdout.write(f"{[comm.rank, *said]}\\n")
"""


def test_ranks_are_counted_by_the_launcher_or_by_the_names_of_hosts(launch):
    """Also where MPICH is told that no two ranks are on one host, which UCX's wheel needs.

    Open MPI may give rank 1 another number than 1.
    """
    done = launch(4, program=("-c", NUMBER), env={"MPIR_CVAR_NOLOCAL": "1"})
    found = {rank: numbers for rank, *numbers in map(json.loads, done.out.splitlines())}
    assert sorted(numbers[0] for numbers in found.values()) == [0, 1, 2, 3], done.err
    assert found == {rank: 3 * found[rank][:1] + 2 * [rank] for rank in range(4)}


PROGRAM = """
import ctypes, runpy, sys
CDLL = ctypes.CDLL
def library(name, *options, **more):
    if name != "libcuda.so.1":
        return CDLL(name, *options, **more)
    sys.exit("MPI is imported" if "mpi4py.MPI" in sys.modules else "MPI is not imported")
ctypes.CDLL = library
sys.argv = ["mpirun"]
{start}
"""


@pytest.mark.parametrize(
    "start",
    ["runpy.run_module('mpirun', run_name='__main__')", "import mpirun; mpirun.Engine"],
    ids=["command", "script"],
)
def test_mpi_is_imported_afterwards(start):
    environment = {**os.environ, "SLURM_LOCALID": "0"}
    command = [sys.executable, "-c", PROGRAM.format(start=start)]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stderr == "MPI is not imported\n"
