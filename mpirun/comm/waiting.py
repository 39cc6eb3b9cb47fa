"""How a rank waits for MPI: it polls MPI, at first yielding its core between two polls, later sleeping.

And the communicator of all ranks of a run, which shows when a rank waits for the others.

If there are more ranks than cores, a rank that spins takes a core from ranks that compute. A rank that sleeps learns of
its message up to a nap too late. So a wait spins for a short time first, and sleeps from then on; the longer it has
lasted, the longer are its naps, so that it ends late by a small fraction of its length.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from schedgen.util.errors import UsageError

# What launchers say of the number of ranks, the one that started this process first.
RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_NTASKS")


class RunComm(pkl5.Intracomm):
    """An intracommunicator that calls `on_wait` around calls that take objects and around blocks of `waiting`.

    With an MPI-3.1 library, such as Open MPI 5, mpi4py's own calls for objects fail from 2 GiB on, all ranks together.
    Those of `pkl5` have no such limit. But its `allgather` sends from every rank to every rank: MPI's replaces it.
    """

    on_wait: Callable[[bool], None] = staticmethod(lambda waits: None)  # called when a wait begins, and when it ends

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for all others."""
        self.on_wait(True)
        try:
            yield
        finally:
            self.on_wait(False)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Objects of all ranks on `root`, None elsewhere."""
        with self.waiting():
            return super().gather(sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Objects of all ranks on all, less than 2 GiB together."""
        with self.waiting():
            return MPI.Intracomm.allgather(self, sendobj)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root` on all ranks."""
        with self.waiting():
            return super().bcast(obj, root)


def check_launcher() -> None:
    """UsageError if a launcher has started several processes, each of which MPI takes for a run of one rank."""
    said = next((name for name in RANKS if name in os.environ), None)
    if MPI.COMM_WORLD.size == 1 and said is not None and os.environ[said] not in ("", "0", "1"):
        raise UsageError(
            f"{said} says that there are {os.environ[said]} ranks, but MPI has 1: start them with the mpiexec, or the "
            f"srun --mpi, of the MPI that mpi4py uses; or unset {said} to have one rank"
        )


SPIN, CROWDED_SPIN = 2e-3, 50e-6  # seconds of spinning: with a core for every rank, and with more ranks than cores
NAP, LONGEST_NAP = 50e-6, 1e-3  # seconds of one sleep
LONGEST_IDLE_NAP = 5e-3  # where a waiting rank moves no messages
LATE = 0.02  # a nap, as a fraction of the time waited so far
PR_SET_TIMERSLACK = 29  # in linux/prctl.h

# Whether a transfer is done; a call lets MPI make progress on it. A message's stays True until the next start, and may
# be called again; any other is not called again after True.
Done = Callable[[], bool]


def punctual_naps() -> None:
    """Make the sleeps of this thread end on time: otherwise Linux adds 50 us to each."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))


def spin_then_sleep(done: Done, poll: Callable[[], None], spin: float, longest: float = LONGEST_NAP) -> None:
    """Block until `done()`; meanwhile call `poll`, yielding the core for `spin` seconds and then sleeping.

    `longest`: seconds of one sleep.
    """
    begin = time.perf_counter()
    while not done():
        poll()
        waited = time.perf_counter() - begin
        if waited < spin:
            os.sched_yield()
        else:
            time.sleep(min(max(NAP, LATE * waited), longest))


def sleeping_any(comm: MPI.Comm, here: bool) -> bool:
    """Whether `here` is true on some rank. Collective; waiting ranks sleep, so that ranks that compute have the cores.

    It is also a barrier: no rank returns before all have called it.
    """
    anywhere = np.array([here])
    sleep_until(comm, comm.Iallreduce(MPI.IN_PLACE, anywhere, MPI.LOR).Test)
    return bool(anywhere[0])


def sleeping_barrier(comm: MPI.Comm) -> None:
    """A barrier in which ranks sleep."""
    sleep_until(comm, comm.Ibarrier().Test)


def sleep_until(comm: MPI.Comm, done: Done) -> None:
    """Sleep until a collective call is done."""
    with comm.waiting() if isinstance(comm, RunComm) else contextlib.nullcontext():
        spin_then_sleep(done, lambda: None, 0, LONGEST_IDLE_NAP)
