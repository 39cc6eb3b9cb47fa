"""Where a rank's tensors live, and all that differs between a CPU and a GPU.

On a GPU kernels are executed later than they are launched. MPI knows nothing of that, so it must not touch memory
before the kernels that use it are done: `mark` records an event behind the kernels launched so far, and
`Mark.reached` asks whether the GPU has come to it. On a CPU a call returns when its work is done: it needs no marks.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import ClassVar, Protocol

import torch
from mpi4py import MPI
from torch import Tensor

from schedgen.util.errors import UsageError


class Mark(Protocol):
    """A point in a GPU's stream of kernels."""

    def reached(self) -> bool:
        """Whether all kernels launched before it are done."""


class Device:
    """The CPU, and the interface of all devices."""

    kind: ClassVar[str] = "cpu"  # torch's type of device
    direct = True  # MPI takes its tensors as they are
    description = ""  # what rank 0 prints at the start

    def __init__(self) -> None:
        """Nothing needs to be prepared on a CPU."""
        self.torch = torch.device("cpu")

    def mark(self) -> Mark | None:
        """A mark behind all work launched so far; None if that is done already."""
        return None

    def host(self, size: int) -> Tensor:
        """Host memory, shape (bytes,), of the kind that is copied fastest from and to the device."""
        return torch.empty(size, dtype=torch.uint8)

    def seed(self, value: int) -> None:
        """Seed the generator that dropout draws from."""
        torch.default_generator.manual_seed(value)

    def finish(self) -> None:
        """Wait for all work launched so far."""


class _Event:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def reached(self) -> bool:
        return bool(self.event.query())


class Cuda(Device):
    """One GPU, chosen by the rank's number on its host; several ranks may share one."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective."""
        same_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        number, ranks = same_host.rank, same_host.size
        same_host.Free()
        count = torch.cuda.device_count()
        self.torch = torch.device("cuda", number % count)
        torch.cuda.set_device(self.torch)
        self.direct = bool(comm.allreduce(cuda_aware(), MPI.LAND))
        how = "MPI takes GPU tensors as they are" if self.direct else "messages go through pinned host memory"
        shared = f", {ranks} ranks on {count}" if ranks > count else ""
        self.description = f"device: {torch.cuda.get_device_name(self.torch)}{shared}; {how}"

    def mark(self) -> Mark | None:
        """An event in the current stream."""
        return _Event()

    def host(self, size: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def seed(self, value: int) -> None:
        """Seed the generator of this GPU."""
        torch.cuda.default_generators[self.torch.index].manual_seed(value)

    def finish(self) -> None:
        """Wait for all kernels launched so far."""
        torch.cuda.synchronize(self.torch)


def cuda_aware() -> bool:
    """Whether the loaded MPI says that it takes GPU memory.

    Open MPI answers MPIX_Query_cuda_support; MPICH and others name the kinds of memory that they take in the
    communicator's info (MPI 4.1, section 12.4).
    """
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None)
    if query is None:
        with contextlib.suppress(OSError):
            query = getattr(ctypes.CDLL("libmpi.so"), "MPIX_Query_cuda_support", None)
    if query is not None and query():
        return True
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return "cuda" in kinds


def choose_device(comm: MPI.Intracomm, name: str) -> Device:
    """`name`: cpu, cuda, or auto (a GPU if every rank has one). UsageError if there is no GPU for cuda. Collective."""
    available = bool(comm.allreduce(torch.cuda.is_available(), MPI.LAND))
    if name == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no GPU on every host")
    return Cuda(comm) if available and name != "cpu" else Device()
