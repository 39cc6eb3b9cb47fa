"""How late a GPU's transfers begin: from the end of the kernels before a send to MPI's Isend, in microseconds.

The GPU is a thread that executes a stream of kernels, each a sleep of 0.2 to 2 ms. The launching thread never waits: it
launches small torch ops, as a Python program that keeps a GPU busy does, or runs plain Python code. This shows the cost
of threads, naps and the GIL, and how much of its speed the launching thread keeps. What CUDA's events add only a GPU
can show.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from mpi4py import MPI

from mpirun.comm.device import Device
from mpirun.comm.gpu_transport import QueuedTransport, Transfer

SENDS = 20 if "--quick" in sys.argv else 500


class Mark:
    """A point in the thread's stream, and when the thread came to it."""

    def __init__(self) -> None:
        self.at = 0.0

    def come(self) -> None:
        self.at = time.perf_counter()

    def reached(self) -> bool:
        return self.at > 0

    def arrive(self) -> None:
        raise NotImplementedError("there is one stream")


class Thread(Device):
    """A device that is a thread."""

    kind: ClassVar[str] = "thread"

    def __init__(self) -> None:
        super().__init__()
        self.stream: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            self.stream.get()()

    def mark(self) -> Mark:
        mark = Mark()
        self.stream.put(mark.come)
        return mark


class Timed(QueuedTransport):
    """Notes how late sends begin."""

    def __init__(self, device: Device) -> None:
        super().__init__(MPI.COMM_SELF, (), device=device)
        self.delays: list[float] = []

    def _enqueue(self, queue: deque[Transfer], transfer: Transfer) -> None:
        begin, mark = transfer.begin, transfer.mark

        def timed() -> MPI.Request:
            assert isinstance(mark, Mark)
            self.delays.append(1e6 * (time.perf_counter() - mark.at))
            return begin()

        if queue is self.sends:
            transfer.begin = timed
        super()._enqueue(queue, transfer)


def small_ops(x: torch.Tensor) -> None:
    for _ in range(10):
        x.add_(1.0)


def python_alone(x: torch.Tensor) -> None:
    number = 0
    for k in range(5000):
        number += k


def delays(launch: Callable[[torch.Tensor], None]) -> tuple[list[float], float]:
    """The delays of sends to this rank while the launching thread repeats `launch`, and its calls per second."""
    device, rng = Thread(), np.random.default_rng(0)
    transport = Timed(device)
    out, into, x = torch.ones(1), torch.zeros(1), torch.zeros(1000)
    receive, launched, begin = transport.receive(into, 0, 1), 0, time.perf_counter()
    for _ in range(SENDS):
        receive.start()
        duration = rng.uniform(2e-4, 2e-3)
        device.stream.put(lambda duration=duration: time.sleep(duration))
        sent = transport.send(out, 0, 1)
        while not sent() or not receive.done():
            launch(x)
            launched += 1
    rate = launched / (time.perf_counter() - begin)
    transport.free()
    return transport.delays, rate


def alone(launch: Callable[[torch.Tensor], None]) -> float:
    """The calls of `launch` per second in a thread without others."""
    x, begin = torch.zeros(1000), time.perf_counter()
    for _ in range(2000):
        launch(x)
    return 2000 / (time.perf_counter() - begin)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for launch in (small_ops, python_alone):
        before = alone(launch)
        found, rate = delays(launch)
        shares = (f"{share} % {np.percentile(found, share):6.0f} us" for share in (50, 90, 99))
        speed = f"launches at {rate / before:.2f} of the speed"
        sys.stdout.write(f"{launch.__name__.replace('_', ' '):14}{'   '.join([*shares, speed])}\n")
