"""Tries messages between the memories of GPUs: what the MPI library says of itself is not enough.

The library often reports what it was built with, not what works here. If it is wrong, the first message may crash the
rank, so ranks tell the watchdog, send trial messages before they train, and compare what has arrived.
"""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.message import mpi_buffer

SIZES = (8, 2**16 + 1, 2**22)  # bytes: libraries send these at once, in pieces, and by copies between GPUs


def messages_arrive(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Whether every rank receives what its neighbour sends; the same on all ranks. Collective."""
    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    right = True
    for size in SIZES:
        sent, arrived = pattern(comm.rank, size, device), torch.zeros(size, dtype=torch.uint8, device=device)
        expected = pattern(before, size, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        comm.Sendrecv(mpi_buffer(sent), behind, recvbuf=mpi_buffer(arrived), source=before)
        right = right and torch.equal(arrived, expected)
    return bool(comm.allreduce(right, MPI.LAND))


def pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """Bytes that tell from which rank they are, shape (size,)."""
    return ((torch.arange(size, device=device) + 7 * rank) % 251 + 1).to(torch.uint8)
