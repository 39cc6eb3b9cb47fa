"""What a message costs between neighbouring ranks: alpha seconds, and beta seconds per byte, by ping-pong."""

from __future__ import annotations

import time

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from mpirun.comm.device import Device
from mpirun.comm.gpu_transport import make_transport
from mpirun.comm.transport import Transport

SIZES = [8 << k for k in range(22)]  # bytes, to 16 MiB
SMALL = 2**16  # bytes: up to this size single times scatter so much that more of them are taken
REPETITIONS, SMALL_REPETITIONS, WARM_UP = 12, 42, 2
ROUNDS = 5  # at most: another round is measured if other programs disturbed the links so much that beta is 0
TAG = 1


def measure_link_speed(comm: MPI.Intracomm, device: Device, crowded: bool) -> tuple[float, float]:
    """(alpha, beta), the same on all ranks, fitted to the medians over all pairs; zeros for one rank. Collective.

    Messages are between the memories of devices, as a run's are.
    """
    if comm.size == 1:
        return 0.0, 0.0
    transport = make_transport(comm, (), crowded, device=device)
    least = np.full(len(SIZES), np.inf)
    for _ in range(ROUNDS):
        least = np.minimum(least, _one_round(comm, transport))
        alpha, beta = fit_alpha_beta(np.array(SIZES, np.float64), least)
        if beta > 0:
            break
    transport.free()
    return alpha, beta


def _one_round(comm: MPI.Intracomm, transport: Transport) -> NDArray[np.float64]:
    """Seconds by size, the medians over all pairs, the same on all ranks. Collective.

    Ranks 0-1, 2-3 and so on send at once, then ranks 1-2, 3-4, because pipelines do so.
    """
    by_pair: list[list[float]] = []  # seconds by size
    for first in (0, 1) if comm.size > 2 else (0,):
        low = (comm.rank - first) % 2 == 0
        peer = comm.rank + 1 if low else comm.rank - 1
        comm.Barrier()
        if 0 <= peer < comm.size:
            by_pair.append([ping_pong(transport, peer, size, low) for size in SIZES])
    all_pairs = [seconds for pairs in comm.allgather(by_pair) for seconds in pairs]
    return np.median(all_pairs, axis=0)


def ping_pong(transport: Transport, peer: int, size: int, first: bool) -> float:
    """The median of half the seconds that `size` bytes take to the peer and back; `first`: this rank sends first."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=transport.device.torch) for _ in range(2))
    receive = transport.receive(into, peer, TAG)
    seconds = []
    for _ in range(SMALL_REPETITIONS if size <= SMALL else REPETITIONS):
        begin = time.perf_counter()
        receive.start()
        if first:
            transport.wait(transport.send(out, peer, TAG))
        transport.wait(receive.done)
        if not first:
            transport.wait(transport.send(out, peer, TAG))
        transport.device.finish()
        seconds.append((time.perf_counter() - begin) / 2)
    return float(np.median(seconds[WARM_UP:]))


def fit_alpha_beta(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(alpha, beta), neither negative, of the least squares of (alpha + beta * size) / seconds - 1.

    Errors are relative, so that messages of 8 bytes count as much as those of 16 MiB.
    """
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    if beta < 0:
        alpha, beta = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0
    return float(alpha), float(beta)
