"""How a rank waits for MPI: it asks MPI again and again and yields its core between two questions, then it sleeps.

A rank that spins takes the core from ranks that compute, where there are more ranks than cores. A rank that sleeps
learns of its message up to a nap too late. So a wait spins for a short time first, and sleeps from then on; the longer
it has lasted, the longer are its naps, so that it is late by a small part of itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpirun.comm.run_comm import RunComm

SPIN, CROWDED_SPIN = 2e-3, 50e-6  # seconds of spinning: with a core for every rank, and with more ranks than cores
NAP, LONGEST_NAP = 50e-6, 1e-3  # seconds of one sleep
LATE = 0.02  # of the time waited so far: a nap
PR_SET_TIMERSLACK = 29  # in linux/prctl.h

# Whether a transfer is done; asking lets MPI go on with it. A message's stays True until its next start, and may be
# asked again; others are not asked again after True.
Done = Callable[[], bool]


def punctual_naps() -> None:
    """Let the naps of this thread end in time: otherwise Linux adds 50 us to each."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))


def spin_then_sleep(done: Done, poll: Callable[[], None], spin: float) -> None:
    """Return when `done()`; until then call `poll`, yielding the core for `spin` seconds and then sleeping."""
    begin = time.perf_counter()
    while not done():
        poll()
        waited = time.perf_counter() - begin
        if waited < spin:
            os.sched_yield()
        else:
            time.sleep(min(max(NAP, LATE * waited), LONGEST_NAP))


def sleeping_any(comm: MPI.Comm, here: bool) -> bool:
    """Whether `here` is true on some rank. Ranks sleep until all are there: those that compute have the cores.

    A barrier, too: no rank returns before all have come.
    """
    anywhere = np.array([here])
    _sleep(comm, comm.Iallreduce(MPI.IN_PLACE, anywhere, MPI.LOR).Test)
    return bool(anywhere[0])


def sleeping_barrier(comm: MPI.Comm) -> None:
    """A barrier in which ranks sleep."""
    _sleep(comm, comm.Ibarrier().Test)


def _sleep(comm: MPI.Comm, done: Done) -> None:
    with comm.waiting() if isinstance(comm, RunComm) else contextlib.nullcontext():
        spin_then_sleep(done, lambda: None, 0)
