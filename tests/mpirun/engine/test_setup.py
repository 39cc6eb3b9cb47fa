"""What a rank has of its host."""

from __future__ import annotations

import os

import pytest

CORES = sorted(os.sched_getaffinity(0))
SHARES = """
import os, sys
import torch
from mpi4py import MPI
from mpirun.engine.setup import use_host
comm = MPI.COMM_WORLD
os.sched_setaffinity(0, eval(sys.argv[1])[comm.rank])
crowded = use_host(comm, "cpu", 0, "auto", False).crowded
found = comm.gather((crowded, torch.get_num_threads()))
if found:
    print(found)
"""


@pytest.mark.skipif(len(CORES) < 2, reason="ranks are bound to two cores")
@pytest.mark.parametrize("apart", [{}, {"MPIR_CVAR_NOLOCAL": "1", "COLD_RANKS": "1"}], ids=["together", "apart"])
@pytest.mark.parametrize(
    ("bound", "shares"),
    [
        ([CORES[:2]], [(False, 2)]),
        ([CORES[:2]] * 2, [(False, 1)] * 2),
        ([CORES[:1], CORES[1:2]], [(False, 1)] * 2),
        ([CORES[:1], CORES[1:2], CORES[1:2]], [(False, 1), (True, 1), (True, 1)]),
    ],
)
def test_cores_are_shared_by_the_ranks_that_may_use_them(launch, bound, shares, apart):
    """Whether launchers bind ranks to cores or leave all cores to all, or MPICH is told that no two are on one host."""
    done = launch(len(bound), program=["-c", SHARES, str(bound)], env=apart)
    assert (done.code, done.out) == (0, f"{shares}\n"), done.err
