"""How a rank waits for MPI: it asks MPI again and again and yields its core between two questions, then it sleeps.

A rank that spins takes the core from ranks that compute, where there are more ranks than cores. A rank that sleeps
learns of its message up to `NAP` too late. So a wait spins for a short time first, and sleeps from then on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpi4py import MPI

SPIN, CROWDED_SPIN = 2e-3, 50e-6  # seconds of spinning: with a core for every rank, and with more ranks than cores
NAP = 50e-6  # seconds of one sleep

Done = Callable[[], bool]  # whether a transfer is done; asking lets MPI go on with it; not asked again after True


def spin_then_sleep(done: Done, poll: Callable[[], None], spin: float) -> None:
    """Return when `done()`; until then call `poll`, yielding the core for `spin` seconds and then sleeping."""
    sleeps_from = time.perf_counter() + spin
    while not done():
        poll()
        if time.perf_counter() < sleeps_from:
            os.sched_yield()
        else:
            time.sleep(NAP)


def sleeping_barrier(comm: MPI.Comm) -> None:
    """A barrier in which ranks sleep, so that the cores are left to the ranks that still compute."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
