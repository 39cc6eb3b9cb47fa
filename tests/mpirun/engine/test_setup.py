"""The cores and threads that a rank has on its host."""

from __future__ import annotations

import os

import pytest

CORES = sorted(os.sched_getaffinity(0))
# The cores that each rank may use, and for each whether it shares one, and how many threads it takes.
BOUND = [
    ([CORES[:2]], [(False, 2)]),
    ([CORES[:2]] * 2, [(False, 1)] * 2),
    ([CORES[:1], CORES[1:2]], [(False, 1)] * 2),
    ([CORES[:1], CORES[1:2], CORES[1:2]], [(False, 1), (True, 1), (True, 1)]),
]
SHARES = """
import os, sys, torch
from mpi4py import MPI
from mpirun.engine.options import SetupOptions
from mpirun.engine.setup import use_host
comm = MPI.COMM_WORLD
for cores in eval(sys.argv[1]):
    ranks = comm.Split(0 if comm.rank < len(cores) else MPI.UNDEFINED)
    if ranks:
        os.sched_setaffinity(0, cores[ranks.rank])
        crowded = use_host(ranks, SetupOptions(device="cpu")).crowded
        found = ranks.gather((crowded, torch.get_num_threads()))
        if found:
            print(found)
"""


@pytest.mark.skipif(len(CORES) < 2, reason="ranks are bound to two cores")
@pytest.mark.parametrize("apart", [{}, {"MPIR_CVAR_NOLOCAL": "1"}], ids=["together", "apart"])
def test_cores_are_shared_by_the_ranks_that_may_use_them(launch, apart):
    """Whether launchers bind ranks to cores or leave all cores to all, or MPICH is told that no two share a host."""
    done = launch(3, program=["-c", SHARES, str([cores for cores, _ in BOUND])], env=apart)
    assert (done.code, done.out.splitlines()) == (0, [str(shares) for _, shares in BOUND]), done.err
