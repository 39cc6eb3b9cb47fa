"""The communicator of a run shows its waits, and takes objects of any size."""

from __future__ import annotations

import pytest
from mpi4py import MPI
from mpi4py.util import pkl5

from mpirun.comm.waiting import RANKS, RunComm, check_launcher, sleeping_barrier
from schedgen.util.errors import UsageError


def test_an_object_may_be_larger_than_a_count_of_mpi(monkeypatch):
    asked = []  # for the largest count, 8 bytes here
    monkeypatch.setattr(pkl5._BigMPI, "blocksize", property(lambda _: asked.append(8) or 8))
    comm, large = RunComm(MPI.COMM_SELF), {"weights": bytes(range(100))}
    assert comm.gather(large) == [large] and len(asked) == 2  # where it is sent, and where it is received
    assert comm.bcast(large) == large and len(asked) == 3


def test_each_wait_for_all_is_shown():
    comm, shown = RunComm(MPI.COMM_SELF), []
    comm.on_wait = shown.append
    for wait in (
        lambda: comm.gather(1),
        lambda: comm.allgather(1),
        lambda: comm.bcast(1),
        lambda: sleeping_barrier(comm),
    ):
        wait()
        assert shown == [True, False]
        shown.clear()


def test_processes_that_each_are_a_run_of_one_rank_are_refused(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    check_launcher()
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(UsageError, match="SLURM_NTASKS says that there are 4 ranks, but MPI has 1: start them with"):
        check_launcher()
    monkeypatch.setenv("PMI_SIZE", "1")  # mpiexec -n 1 in an allocation of four tasks
    check_launcher()
