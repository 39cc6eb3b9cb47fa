"""Clocks of several hosts: the offset of this rank's clock from rank 0's, and the conversion of times to rank 0's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpirun.comm.transport import Transport

ROUNDS = 50  # exchanges with each rank, of which the quickest counts
TAG = 98


class ClockReading(NamedTuple):
    """What this rank's clock shows at some moment, and how far rank 0's clock is ahead of it; seconds."""

    time: float
    ahead: float
    error: float  # by which `ahead` may be wrong


def read_clocks(transport: Transport, clock: Callable[[], float] = time.perf_counter) -> ClockReading:
    """Compare this rank's clock with rank 0's. Collective; all ranks return at about the same moment.

    Rank 0 asks each rank for its time, and assumes that the rank reads its clock half-way between question and answer.
    """
    comm = transport.comm
    answer, measured = np.zeros(1), np.zeros(2)

    def send(peer: int, values: NDArray[np.float64]) -> None:
        transport.wait(comm.Isend(values, peer, TAG).Test)

    def receive(peer: int, values: NDArray[np.float64]) -> None:
        transport.wait(comm.Irecv(values, peer, TAG).Test)

    if comm.rank == 0:
        for peer in range(1, comm.size):
            best = (float("inf"), 0.0)
            for _ in range(ROUNDS):
                begin = clock()
                send(peer, np.zeros(1))
                receive(peer, answer)
                end = clock()
                best = min(best, (end - begin, (begin + end) / 2 - float(answer[0])))
            send(peer, np.array(best))
    else:
        for _ in range(ROUNDS):
            receive(0, answer)
            send(0, np.array([clock()]))
        receive(0, measured)
    transport.wait(comm.Ibarrier().Test)
    return ClockReading(clock(), float(measured[1]), float(measured[0]) / 2)


def as_rank_0_times(times: NDArray[np.float64], before: ClockReading, after: ClockReading) -> NDArray[np.float64]:
    """Times of this rank's clock converted to rank 0's, in seconds; between two readings the difference is linear.

    A difference that is within its error counts as 0, so that ranks of one host keep their times.
    """
    first, last = (0.0 if abs(reading.ahead) <= reading.error else reading.ahead for reading in (before, after))
    elapsed = (times - before.time) / max(after.time - before.time, 1e-9)
    return times + (first + (last - first) * elapsed)
