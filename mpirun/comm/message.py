"""A tensor as a buffer argument of MPI calls.

What MPI reads or writes is owned by the request: mpi4py's request keeps the buffer that it was made from, a persistent
one until `Free`, another until `Test` is true, and the buffer keeps the tensor (`memory_of`).
"""

from __future__ import annotations

from math import gcd
from typing import Any

from mpi4py import MPI
from torch import Tensor

from mpirun.data.values import memory_of

# By width in bytes: the types that messages are counted in, so that counts stay small.
_TYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


def mpi_buffer(tensor: Tensor) -> list[Any]:
    """What MPI calls take for a contiguous tensor: memory, which keeps the tensor alive, count, type."""
    assert tensor.is_contiguous()
    size = tensor.nbytes
    width = gcd(size, 16)
    return [memory_of(tensor), size // width, _TYPES[width]]
