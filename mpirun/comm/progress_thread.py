"""The pump: MPI moves large messages only while somebody is inside MPI.

Between instructions the interpreter calls MPI anyway. Inside a computation
that takes long nobody does, so there the ends of its layers do, forwards and
backwards, at most once a millisecond; where layers themselves take long, a
thread wakes up every millisecond. Measured, either hides nearly all of a
transfer. Ends of layers cost nothing that shows; the thread, where every core
has a rank, takes some percent of a computation of many small operations, and
MPI's own progress threads a whole core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.fail_together import meet

PERIOD = 1e-3  # seconds between two calls
LONG = 2e-3  # seconds without a call that are worth one


class Pump:
    def __init__(self, comm: MPI.Intracomm, poll: Callable[[], None]) -> None:
        """`poll`: what the rank's own thread calls. Collective: the other one has a communicator of its own."""
        self.poll, self.last = poll, 0.0
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        meet(comm)
        self.comm = comm.Dup()
        self.on = False
        self.gate = threading.Lock()  # locked: the thread waits
        self.gate.acquire()
        self.started = False

    # At the ends of layers

    def put_into(self, module: nn.Module) -> None:
        """From now on the forwards and backwards of a module's layers call MPI."""
        for layer in layers(module):
            layer.register_forward_hook(self._after_forward)

    def _tick(self, _: Any = None) -> None:
        now = time.perf_counter()
        if now - self.last > PERIOD:
            self.poll()
            self.last = now

    def _after_forward(self, layer: nn.Module, given: Any, output: Any) -> None:
        self._tick()
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(self._tick)

    # In a thread

    def around(self, act: Callable[[], None]) -> Callable[[], None]:
        """`act`, with a thread that calls MPI meanwhile; `act` itself where MPI lets one thread in only."""
        if not self.threads:
            return act
        if not self.started:
            self.started = True
            threading.Thread(target=self._run, name="pump", daemon=True).start()

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


def layers(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that have no parts; what torch.compile made is one."""
    children = list(module.children())
    if not children or hasattr(module, "_orig_mod"):
        return [module]
    return [layer for child in children for layer in layers(child)]
