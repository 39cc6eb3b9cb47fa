"""Where a rank's tensors live, and all that differs between a CPU and a GPU.

On a GPU kernels are launched ahead of their execution, so that MPI, which
knows nothing of streams, must not touch memory before the kernels that use it
are done: `mark` notes a place in the stream, `Mark.reached` asks whether the
GPU has come to it. On a CPU everything has happened when a call returns, and
there are no marks.
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
    def reached(self) -> bool: ...


class Device:
    """The CPU."""

    kind: ClassVar[str] = "cpu"
    direct = True  # MPI takes its tensors as they are
    said = ""  # what to say once at start

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def mark(self) -> Mark | None:
        """A place in the stream of work; None where all work given so far is done."""
        return None

    def host(self, size: int) -> Tensor:
        """Host memory that copies from and to the device are fast with, shape (bytes,)."""
        return torch.empty(size, dtype=torch.uint8)

    def seed(self, value: int) -> None:
        """Seed the generator that dropout draws from."""
        torch.default_generator.manual_seed(value)

    def finish(self) -> None:
        """Wait for all work given so far."""


class _Event:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def reached(self) -> bool:
        return bool(self.event.query())


class Cuda(Device):
    """One GPU, chosen by the rank's place on its host; several ranks may share it."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, comm: MPI.Intracomm) -> None:
        here = comm.Split_type(MPI.COMM_TYPE_SHARED)
        place, ranks = here.rank, here.size
        here.Free()
        count = torch.cuda.device_count()
        self.torch = torch.device("cuda", place % count)
        torch.cuda.set_device(self.torch)
        self.direct = bool(comm.allreduce(cuda_aware(), MPI.LAND))
        how = "MPI takes GPU tensors as they are" if self.direct else "messages go through pinned host memory"
        shared = f", {ranks} ranks on {count}" if ranks > count else ""
        self.said = f"device: {torch.cuda.get_device_name(self.torch)}{shared}; {how}"

    def mark(self) -> Mark | None:
        return _Event()

    def host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def seed(self, value: int) -> None:
        torch.cuda.default_generators[self.torch.index].manual_seed(value)

    def finish(self) -> None:
        torch.cuda.synchronize(self.torch)


def cuda_aware() -> bool:
    """Whether the loaded MPI says that it takes GPU memory.

    Open MPI answers MPIX_Query_cuda_support; MPICH and others name the kinds of
    memory they take in the communicator's info (MPI 4.1, section 12.4).
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


def device(comm: MPI.Intracomm, name: str) -> Device:
    """`name`: cpu, cuda, or auto: a GPU where every rank has one."""
    available = bool(comm.allreduce(torch.cuda.is_available(), MPI.LAND))
    if name == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no GPU on every host")
    return Cuda(comm) if available and name != "cpu" else Device()
