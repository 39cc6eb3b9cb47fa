"""Where a rank's tensors live, and all that differs between a CPU and a GPU.

On a GPU kernels are executed later than they are launched. MPI knows nothing of that, so it must not touch memory
before the kernels that use it are done: `mark` records an event behind the kernels launched so far, and
`Mark.reached` asks whether the GPU has come to it. What one stream does for another is ordered without the host:
`Mark.arrive`. On a CPU a call returns when its work is done: it needs no marks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.gpu_trial import messages_arrive
from schedgen.util.errors import UsageError

WAYS = ("auto", "direct", "host")  # of --gpu-messages


class Mark(Protocol):
    """A point in one of a GPU's streams of kernels."""

    def reached(self) -> bool:
        """Whether all kernels launched before it are done."""

    def arrive(self) -> None:
        """Kernels launched from now on into the current stream run after it; the host does not wait."""


class Device:
    """The CPU, and the interface of all devices."""

    kind: ClassVar[str] = "cpu"  # torch's type of device
    direct = True  # MPI takes its tensors as they are

    def __init__(self) -> None:
        """Nothing needs to be prepared on a CPU."""
        self.torch = torch.device("cpu")

    @property
    def description(self) -> str:
        """What rank 0 prints at the start."""
        return ""

    def mark(self) -> Mark | None:
        """A mark behind all work launched so far into the current stream; None if that is done already."""
        return None

    def copies(self, out: bool) -> contextlib.AbstractContextManager[object]:
        """In it, this thread launches into the stream of copies to the host (`out`) or from it."""
        return contextlib.nullcontext()

    def host(self, size: int) -> Tensor:
        """Host memory, shape (bytes,), of the kind that is copied fastest from and to the device."""
        return torch.empty(size, dtype=torch.uint8)

    def seed(self, value: int) -> None:
        """Seed the generator that dropout draws from."""
        torch.default_generator.manual_seed(value)

    def finish(self) -> None:
        """Wait for all work launched so far."""

    def use_in_thread(self) -> None:
        """Prepare a thread in which MPI will be called."""

    def be_deterministic(self) -> None:
        """Choose kernels that give the same bits whenever they run: on a CPU they do."""

    def try_messages(self, comm: MPI.Intracomm) -> None:
        """Find out whether messages arrive in the device's memory, before a step needs them. Collective."""

    def reserved(self) -> int | None:
        """The most bytes that the allocator had at once, with what it keeps to use again; None where nobody counts."""
        return None


class _Event:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def reached(self) -> bool:
        return bool(self.event.query())

    def arrive(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class Cuda(Device):
    """One GPU, chosen by the rank's number on its host; several ranks may share one."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, comm: MPI.Intracomm, messages: str) -> None:
        """`messages`: one of WAYS. Collective."""
        same_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        number = same_host.rank
        self.torch = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(self.torch)
        # The default stream waits for what others launch, MPI too, and they for it.
        torch.cuda.set_stream(torch.cuda.Stream(self.torch))
        self.copy_streams = torch.cuda.Stream(self.torch), torch.cuda.Stream(self.torch)
        gpus = [str(each) for each in same_host.allgather(torch.cuda.get_device_properties(self.torch).uuid)]
        same_host.Free()
        self.messages = messages
        self.direct = messages == "direct" or (messages == "auto" and bool(comm.allreduce(cuda_aware(), MPI.LAND)))
        self.shared = f", {len(gpus)} ranks on {len(set(gpus))}" if len(set(gpus)) < len(gpus) else ""

    @property
    def description(self) -> str:
        """The GPU, who shares it, and how messages go."""
        how = "MPI takes GPU tensors as they are" if self.direct else "messages go through pinned host memory"
        if self.direct and "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            how += ", though expandable_segments:True may keep it from reading another process's"
        return f"device: {torch.cuda.get_device_name(self.torch)}{self.shared}; {how}"

    def mark(self) -> Mark | None:
        """An event in the current stream."""
        return _Event()

    def copies(self, out: bool) -> contextlib.AbstractContextManager[object]:
        """One stream for each direction: a GPU copies both ways at once."""
        return torch.cuda.stream(self.copy_streams[out])

    def host(self, size: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def seed(self, value: int) -> None:
        """Seed the generator of this GPU, and that of the CPU, from which a layer may draw, too."""
        super().seed(value)
        torch.cuda.default_generators[self.torch.index].manual_seed(value)

    def finish(self) -> None:
        """Wait for all kernels launched so far."""
        torch.cuda.synchronize(self.torch)

    def use_in_thread(self) -> None:
        """A thread begins with another GPU."""
        torch.cuda.set_device(self.torch)

    def be_deterministic(self) -> None:
        """As torch's notes on reproducibility say; cuBLAS reads its variable when it is first used."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    def try_messages(self, comm: MPI.Intracomm) -> None:
        """With `auto` messages go through host memory if the trial fails; UsageError if they were to be direct."""
        if self.direct and not messages_arrive(comm, self.torch):
            if self.messages == "direct":
                raise UsageError("--gpu-messages direct: MPI does not move GPU memory, but something else or nothing")
            self.direct = False

    def reserved(self) -> int:
        """That of torch's caching allocator."""
        return torch.cuda.max_memory_reserved(self.torch)


def cuda_aware() -> bool:
    """Whether the loaded MPI says that it takes GPU memory.

    Open MPI answers MPIX_Query_cuda_support; MPICH and others name the kinds of memory that they take in the
    communicator's info (MPI 4.1, section 12.4).
    """
    for library in mpi_libraries(Path("/proc/self/maps").read_text()):
        with contextlib.suppress(OSError, AttributeError):
            if ctypes.CDLL(library).MPIX_Query_cuda_support():
                return True
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return "cuda" in kinds


def mpi_libraries(maps: str) -> list[str]:
    """The files of the MPI libraries that a process has loaded; `maps`: its memory map, as Linux shows it."""
    return list(dict.fromkeys(re.findall(r"(/\S*/libmpi[^/\s]*\.so[^/\s]*)$", maps, re.M)))


def choose_device(comm: MPI.Intracomm, name: str, messages: str) -> Device:
    """`name`: cpu, cuda, or auto (a GPU if every rank has one); `messages`: one of WAYS. Collective.

    UsageError if there is no GPU for cuda.
    """
    available = bool(comm.allreduce(torch.cuda.is_available(), MPI.LAND))
    if name == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no GPU on every host")
    return Cuda(comm, messages) if available and name != "cpu" else Device()
