"""The communicator of all ranks of a run: it shows when a rank waits for the others, and takes large objects.

With an MPI-3.1 library, such as Open MPI 5, mpi4py's own calls for objects fail from 2 GiB on, all ranks together.
Those of `pkl5` have no such limit. But its `allgather` sends from every rank to every rank: MPI's replaces it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from schedgen.util.errors import UsageError

# What launchers say of the number of ranks, the one that started this process first.
RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_NTASKS")


class RunComm(pkl5.Intracomm):
    """An intracommunicator that calls `on_wait` around calls that take objects and around blocks of `waiting`."""

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
