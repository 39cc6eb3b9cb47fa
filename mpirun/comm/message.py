"""A tensor as a buffer argument of MPI calls."""

from __future__ import annotations

from math import gcd
from typing import Any

from mpi4py import MPI
from torch import Tensor

# By width in bytes: the types that messages are counted in, so that counts stay small.
_TYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


def mpi_buffer(tensor: Tensor) -> list[Any]:
    """What MPI calls take for a contiguous tensor: memory, count, type. It does not keep the tensor alive."""
    assert tensor.is_contiguous()
    size = tensor.nbytes
    width = gcd(size, 16)
    return [MPI.buffer.fromaddress(tensor.data_ptr(), size), size // width, _TYPES[width]]
