"""What a message costs between neighbouring ranks: alpha seconds, and beta seconds a byte."""

from __future__ import annotations

import time

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from mpirun.comm.transport import Transport
from schedgen.ir.instructions import Kind

SIZES = [8 << k for k in range(22)]  # bytes, to 16 MiB
SMALL = 2**16  # bytes: up to here the time of a message says little after a few


def links(comm: MPI.Intracomm, crowded: bool) -> tuple[float, float]:
    """(alpha, beta) on all ranks, fitted to the medians of all pairs; zeros on one rank.

    Ranks 0-1, 2-3 and so on send at once, then 1-2, 3-4: as pipelines do.
    """
    if comm.size == 1:
        return 0.0, 0.0
    transport = Transport(comm, (), crowded)
    found: list[list[float]] = []  # by pair, seconds by size
    for first in (0, 1) if comm.size > 2 else (0,):
        low = (comm.rank - first) % 2 == 0
        peer = comm.rank + 1 if low else comm.rank - 1
        comm.Barrier()
        if 0 <= peer < comm.size:
            found.append([ping_pong(transport, peer, size, low) for size in SIZES])
    every = [seconds for of_rank in comm.allgather(found) for seconds in of_rank]
    return fit(np.array(SIZES, np.float64), np.median(every, axis=0))


def ping_pong(transport: Transport, peer: int, size: int, first: bool) -> float:
    """The median of half the seconds that `size` bytes take to the peer and back."""
    out, into = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    receive = transport.receive(into, peer, Kind.X)
    seconds = []
    for _ in range(42 if size <= SMALL else 12):
        begin = time.perf_counter()
        receive.start()
        if first:
            transport.wait(transport.send(out, peer, Kind.X))
        transport.wait(receive.done)
        if not first:
            transport.wait(transport.send(out, peer, Kind.X))
        seconds.append((time.perf_counter() - begin) / 2)
    return float(np.median(seconds[2:]))


def fit(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(alpha, beta), neither negative, of the least squares of (alpha + beta * size) / seconds - 1.

    Relative errors, so that messages of 8 bytes count as much as those of 16 MiB.
    """
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    if beta < 0:
        alpha, beta = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0
    return float(alpha), float(beta)
