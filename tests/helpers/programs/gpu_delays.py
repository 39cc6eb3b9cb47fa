"""A run on GPUs that measures how late the host notices that kernels have ended, and the GPU that a wait has.

The arguments are those of mpirun. In the end every rank prints `delays: ` and an object, in microseconds:

    ready  from the end of the kernels before a mark until the host sees the mark: then a transfer begins
    begin  from the end of a wait for a message until the GPU begins the job that waited, if the GPU was idle
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from unittest import mock

import torch

from mpirun.cli.main import main
from mpirun.comm.device import Cuda
from mpirun.comm.transport import Transport
from mpirun.engine.core.stage import LocalStage

Instant = tuple[torch.cuda.Event, float]  # an event, and a time on the host's clock

READY: list[Instant] = []
BEGIN: list[Instant] = []
BUSY: list[Instant] = []  # for each of BEGIN: the end of the kernels before it, and when the wait had ended
FIRST: list[Instant] = []  # when the first mark was made
arrived: list[Instant] = []


def event() -> torch.cuda.Event:
    """An event recorded now."""
    recorded = torch.cuda.Event(enable_timing=True)
    recorded.record()
    return recorded


class SeenMark:
    """A mark that notes when it was seen."""

    def __init__(self) -> None:
        if not FIRST:
            FIRST.append(instant())
        self.event, self.seen = event(), False

    def reached(self) -> bool:
        if not self.seen and self.event.query():
            self.seen = True
            READY.append((self.event, time.perf_counter()))
        return self.seen

    def arrive(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def wait(self: Transport, done: Any, row: int = -1) -> None:
    """As `Transport.wait`, which it calls; notes when it had to wait."""
    before = event()
    if not done():
        real_wait(self, done, row)
        arrived[:] = [(before, time.perf_counter())]


def begins() -> None:
    """Note when the GPU comes to the first kernel of a job, if the rank has just waited."""
    if arrived:
        BUSY.append(arrived.pop())
        BEGIN.append((event(), BUSY[-1][1]))


def forward(self: LocalStage, *arguments: Any) -> Any:
    """As `LocalStage.forward`."""
    begins()
    return real_forward(self, *arguments)


def backward(self: LocalStage, *arguments: Any) -> None:
    """As `LocalStage.backward`."""
    begins()
    real_backward(self, *arguments)


def instant() -> Instant:
    """The end of all kernels, on both clocks."""
    torch.cuda.synchronize()
    now = event()
    now.synchronize()
    return now, time.perf_counter()


def delays(instants: list[Instant], last: Instant) -> list[float]:
    """Microseconds from the event to the host's time, of the second half; the clocks are compared at both ends."""
    first = FIRST[0]
    pace = (last[1] - first[1]) / first[0].elapsed_time(last[0])
    return [1e6 * (at - first[1] - pace * first[0].elapsed_time(e)) for e, at in instants[len(instants) // 2 :]]


real_wait, real_forward, real_backward = Transport.wait, LocalStage.forward, LocalStage.backward

if __name__ == "__main__":
    with (
        mock.patch.object(Transport, "wait", wait),
        mock.patch.object(LocalStage, "forward", forward),
        mock.patch.object(LocalStage, "backward", backward),
        mock.patch.object(Cuda, "mark", lambda self: SeenMark()),
    ):
        code = main()
    last = instant()
    idle = zip(delays(BEGIN, last), delays(BUSY, last), strict=True)
    found = {"ready": delays(READY, last), "begin": [-begin for begin, busy in idle if busy > 0]}
    print(f"delays: {json.dumps(found)}", flush=True)
    sys.exit(code)
