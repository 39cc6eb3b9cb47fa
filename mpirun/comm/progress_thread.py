"""MPI calls during computations: large messages move only while some thread is inside MPI.

Between instructions the interpreter calls MPI anyway. During a long computation nobody does. If messages are in flight
that take longer than the period of such calls, a thread calls MPI every millisecond. By measurement, it hides nearly
all of a transfer, and costs up to 5 % of the computation if every core has a rank. So a computation that begins with no
message in flight is left alone. MPI's own progress threads cost a whole core. Messages of GPU memory have a thread
anyway (`gpu_transport`), and need none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpi4py import MPI

from mpirun.comm.device import Device
from mpirun.comm.waiting import sleeping_barrier

PERIOD = 1e-3  # seconds between two calls
ENOUGH = 2**20  # bytes in flight, which take about as long


class MessageProgress:
    """A rank's thread that calls MPI, which starts when it is first needed."""

    def __init__(self, comm: MPI.Intracomm, device: Device | None = None) -> None:
        """`device`: of the computations, None: the CPU. Collective. The thread has a communicator of its own."""
        self.device = device or Device()
        self.allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        sleeping_barrier(comm)
        self.comm = comm.Dup()
        self.computing = False
        self.gate = threading.Lock()  # while it is locked the thread sleeps
        self.gate.acquire()
        self.thread: threading.Thread | None = None
        self.over = False

    def free(self) -> None:
        """End the thread, and free its communicator; no computation may follow. Collective."""
        self.over = True
        if self.thread is not None:
            self._open()
            self.thread.join()
        self.comm.Free()

    def with_thread(self, act: Callable[[], object]) -> Callable[[], object]:
        """`act`, during which the thread calls MPI; `act` unchanged if MPI does not allow several threads."""
        if not self.allowed:
            return act
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
            self.thread.start()

        def act_with_thread() -> None:
            self.computing = True
            self._open()
            try:
                act()
            finally:
                self.computing = False

        return act_with_thread

    def _open(self) -> None:
        if self.gate.locked():  # else the thread has not yet passed the gate since it was last opened
            self.gate.release()

    def _run(self) -> None:
        self.device.use_in_thread()
        while not self.over:
            self.gate.acquire()
            while self.computing:
                time.sleep(PERIOD)
                if self.computing:
                    self.comm.Iprobe(MPI.ANY_SOURCE)
