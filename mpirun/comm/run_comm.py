"""The communicator of all ranks of a run: it shows that a rank waits in it for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI


class RunComm(MPI.Intracomm):
    """As MPI's. Calls that take objects, and those of `waiting`, are shown while they last."""

    on_wait: Callable[[bool], None] = staticmethod(lambda waits: None)  # called when a wait begins, and when it ends

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In it, this rank waits for all others."""
        self.on_wait(True)
        yield
        self.on_wait(False)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Objects of all ranks on `root`, None elsewhere."""
        with self.waiting():
            return super().gather(sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Objects of all ranks on all."""
        with self.waiting():
            return super().allgather(sendobj)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root` on all ranks."""
        with self.waiting():
            return super().bcast(obj, root)
