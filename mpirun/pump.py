"""The pump: MPI moves large messages only while somebody is inside MPI.

Between instructions the interpreter calls MPI anyway. Inside a long
computation nobody does, so for its time a thread wakes up every millisecond
and asks MPI for a message that never comes. Measured, this hides nearly all of
a transfer behind the computation and slows it by about one percent; MPI's own
progress threads and a thread that never sleeps take a core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpi4py import MPI

PERIOD = 1e-3  # seconds between two calls
LONG = 2e-3  # seconds: what computes longer than this is worth waking the thread for


class Pump:
    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective: the thread has a communicator of its own."""
        self.works = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.comm = comm.Dup()
        self.on = False
        self.gate = threading.Lock()  # locked: the thread waits
        self.gate.acquire()
        if self.works:
            threading.Thread(target=self._run, name="pump", daemon=True).start()

    def around(self, act: Callable[[], None]) -> Callable[[], None]:
        """`act`, with messages moving meanwhile."""
        if not self.works:
            return act

        def pumped() -> None:
            self.on = True
            if self.gate.locked():  # else the thread has not seen the last time yet
                self.gate.release()
            act()
            self.on = False

        return pumped

    def _run(self) -> None:
        while True:
            self.gate.acquire()
            while self.on:
                time.sleep(PERIOD)
                if self.on:
                    self.comm.Iprobe(MPI.ANY_SOURCE)
