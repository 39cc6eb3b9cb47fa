"""A run on GPUs that measures how late the host sees what the GPU has done, and the GPU what the host has.

The arguments are those of mpirun. In the end every rank prints `delays: ` and an object, in microseconds:

    ready  from the end of the kernels before a mark until the mark is seen: then a transfer begins
    begin  from the end of a wait for a message until the GPU begins the job that waited
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
from mpirun.engine.stage import LocalStage

Instant = tuple[torch.cuda.Event, float]  # an event, and a time on the host's clock

READY: list[Instant] = []
BEGIN: list[Instant] = []
FIRST: list[Instant] = []  # when the first mark was made
arrived: list[float] = []


def event() -> torch.cuda.Event:
    """One recorded now."""
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
    if not done():
        real_wait(self, done, row)
        arrived[:] = [time.perf_counter()]


def outputs(self: LocalStage, *arguments: Any) -> list[torch.Tensor]:
    """As `LocalStage._outputs`; notes when the GPU begins, if the rank has just waited."""
    if arrived:
        BEGIN.append((event(), arrived.pop()))
    return real_outputs(self, *arguments)


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


real_wait, real_outputs = Transport.wait, LocalStage._outputs

if __name__ == "__main__":
    with (
        mock.patch.object(Transport, "wait", wait),
        mock.patch.object(LocalStage, "_outputs", outputs),
        mock.patch.object(Cuda, "mark", lambda self: SeenMark()),
    ):
        code = main()
    last = instant()
    found = {"ready": delays(READY, last), "begin": [-delay for delay in delays(BEGIN, last)]}
    print(f"delays: {json.dumps(found)}", flush=True)
    sys.exit(code)
