"""A tensor as a buffer argument of MPI calls; and a trial of messages between the memories of GPUs.

What MPI reads or writes is owned by the request: mpi4py's request keeps the buffer that it was made from, a persistent
one until `Free`, another until `Test` is true, and the buffer keeps the tensor (`memory_of`).

An MPI library often reports what it was built with, not what works here. If it is wrong, the first message may crash
the rank, so ranks tell the watchdog, send trial messages before they train, and compare what has arrived.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.data.values import memory_of

# By width in bytes: the types that messages are counted in, so that counts stay small.
_TYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
SIZES = (8, 2**16 + 1, 2**22)  # bytes: libraries send these at once, in pieces, and by copies between GPUs


def mpi_buffer(tensor: Tensor) -> list[Any]:
    """What MPI calls take for a contiguous tensor: memory, which keeps the tensor alive, count, type."""
    assert tensor.is_contiguous()
    size = tensor.nbytes
    width = gcd(size, 16)
    return [memory_of(tensor), size // width, _TYPES[width]]


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
