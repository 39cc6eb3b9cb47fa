"""`make GPU=1`: ranks move messages by UCX's own wheel. Here it is tried on host memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

LIBRARIES = Path(sys.prefix) / "ucx" / "libucx" / "lib"
PROGRAM = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
sent, arrived = bytes([comm.rank + 1]) * 2**20, bytearray(2**20)
comm.Sendrecv(sent, 1 - comm.rank, recvbuf=arrived, source=1 - comm.rank)
assert arrived == bytes([2 - comm.rank]) * 2**20
"""


@pytest.fixture(scope="module")
def environment():
    """The variables for MPI and UCX that make sets for its commands."""
    command = [
        "make",
        "--silent",
        f"--directory={ROOT}",
        "GPU=1",
        f"VENV={sys.prefix}",
        "--eval=shown: ; @env",
        "shown",
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = dict(line.split("=", 1) for line in lines if "=" in line)
    return {name: pairs[name] for name in pairs if name.startswith(("LD_LIBRARY_PATH", "OMPI_MCA_", "MPIR_CVAR_"))}


def test_the_wheel_comes_before_other_libraries(environment):
    assert environment["LD_LIBRARY_PATH"].split(":")[0] == str(LIBRARIES)


@pytest.mark.skipif(not LIBRARIES.is_dir(), reason="the wheel of UCX is not there: make venv GPU=1")
def test_ranks_use_the_wheel(launch, environment):
    done = launch(2, program=("-c", PROGRAM), env={**environment, "UCX_LOG_LEVEL": "info", "COLD_RANKS": "1"})
    assert done.code == 0, done.err
    log = done.out + done.err
    assert f"loaded from {LIBRARIES}" in log
    assert re.search(r"intra-node.* tag\(.*memory", log)
