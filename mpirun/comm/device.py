"""Where a rank's tensors live, and all that differs between a CPU and a GPU.

On a GPU kernels are executed later than they are launched. MPI does not know that, so it must not touch memory before
the kernels that use it are done: `mark` records an event after the kernels launched so far, and `Mark.reached` asks
whether the GPU has reached it. `Mark.arrive` makes one stream wait for another without the host. On a CPU a call
returns when its work is done, so there are no marks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.local_gpu import local_rank
from mpirun.comm.message import messages_arrive
from mpirun.comm.output import note
from mpirun.comm.stream_words import CudaStreamOperations, Number, StreamWords
from schedgen.util.errors import UsageError


class Device:
    """The CPU, and the interface of all devices."""

    kind: ClassVar[str] = "cpu"  # torch's type of device
    direct = True  # MPI reads and writes the tensors' own memory
    has_graphs = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.words: StreamWords | None = None  # they order transfers and kernels now; None: events do
        self.all_words: StreamWords | None = None

    @property
    def description(self) -> str:
        """A line about the device, which rank 0 prints at the start; empty: none."""
        return ""

    def mark(self) -> Mark | None:
        """A mark after all work launched so far into the current stream; None if that is done already."""
        return None

    def use_words(self, ready: bool) -> None:
        """From now on use words, if there are any and `ready`, else events.

        `ready`: steps no longer allocate memory or load kernels.
        """
        self.words = self.all_words if ready else None

    def copies(self, out: bool) -> contextlib.AbstractContextManager[object]:
        """Inside, this thread launches into the stream of copies to the host (`out`) or from it."""
        return contextlib.nullcontext()

    def sums(self) -> contextlib.AbstractContextManager[object]:
        """Inside, this thread launches into the stream in which sums over ranks are added up."""
        return contextlib.nullcontext()

    def host(self, size: int) -> Tensor:
        """Host memory, shape (bytes,), of the kind that is copied fastest from and to the device."""
        # Not by an op of torch: it is not counted.
        return torch.frombuffer(np.empty(max(size, 1), np.uint8), dtype=torch.uint8)

    def seed(self, value: int) -> None:
        """Seed the generator that dropout draws from."""
        torch.default_generator.manual_seed(value)

    def finish(self) -> None:
        """Wait for all work launched so far."""

    def release(self) -> None:
        """Free the memory that the allocator caches."""

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this device's memory."""
        return tensor.device.type == self.kind

    def graph(self, draws: int) -> CudaGraph:
        """An empty graph with `draws` generators, which allocates from a pool that all graphs share."""
        raise NotImplementedError

    def at(self, tensor: Tensor) -> Tensor:
        """A tensor at the address of `tensor`, with its shape and type, that does not own the memory."""
        extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
        if not tensor.numel():
            return torch.empty_like(tensor)
        memory = self._memory(tensor.data_ptr(), extent * tensor.element_size())
        return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())

    def _memory(self, address: int, size: int) -> Tensor:
        """The bytes at an address as a tensor, shape (size,), that does not own them."""
        raise NotImplementedError

    def use_in_thread(self) -> None:
        """Prepare the current thread, which will call MPI."""

    def be_deterministic(self) -> None:
        """Choose kernels that give the same bits whenever they run: on a CPU all do."""

    def try_messages(self, comm: MPI.Intracomm) -> None:
        """Find out whether messages arrive in the device's memory, before a step needs them. Collective."""

    def reserved(self) -> int | None:
        """The most bytes that the allocator held at once, with its cache; None if they are not counted."""
        return None


class _Event:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def reached(self) -> bool:
        return bool(self.event.query())

    def arrive(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


Mark = _Event | Number  # a point in one of a GPU's streams of kernels


class CudaGraph:
    """Kernels that are captured once and launched together from then on.

    Their memory is from a pool that graphs share, so graphs are replayed in the order of their captures.
    """

    def __init__(self, device: torch.device, pool: tuple[int, int], draws: int) -> None:
        """`draws`: how many random number generators it has, one for each time that a layer begins to draw."""
        self.pool = pool
        self.graph: Any = torch.cuda.CUDAGraph()
        self.default: Any = torch.cuda.default_generators[device.index]
        self.generators: list[Any] = [torch.Generator(device) for _ in range(draws)]
        for generator in self.generators:
            self.graph.register_generator_state(generator)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, kernels are captured, not executed. Other threads may still query events, and MPI may copy."""
        own = self.default.graphsafe_get_state()
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the error that made the capture fail is raised
                self.graph.capture_end()
            raise
        else:
            self.graph.capture_end()
        finally:
            self.default.graphsafe_set_state(own)

    def draw(self, number: int) -> None:
        """In a capture, draw from generator `number` from now on."""
        self.default.graphsafe_set_state(self.generators[number].graphsafe_get_state())

    def replay(self, seeds: Sequence[int]) -> None:
        """Launch all kernels, which draw from generators with these seeds."""
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)
        self.graph.replay()


class _Memory:
    """Memory of a GPU, which it does not own, as torch.as_tensor takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class Cuda(Device):
    """One GPU, chosen by the rank's number on its host; several ranks may share one."""

    kind: ClassVar[str] = "cuda"
    has_graphs = True

    def __init__(self, comm: MPI.Intracomm, messages: str, words: bool) -> None:
        """`messages`: a value of --gpu-messages; `words`: stream words replace events. Collective."""
        self.words = None
        self.torch = torch.device("cuda", number_on_host(comm) % torch.cuda.device_count())
        torch.cuda.set_device(self.torch)
        # Not the default stream: it and the streams of others, such as MPI, wait for each other.
        torch.cuda.set_stream(torch.cuda.Stream(self.torch))
        self.pool: tuple[int, int] | None = None  # of graphs
        self.copy_streams = torch.cuda.Stream(self.torch), torch.cuda.Stream(self.torch)
        self.sum_stream = torch.cuda.Stream(self.torch)
        # Autograd's thread has no GPU before its first kernel, and cuBLAS would warn of that.
        torch.ones((), device=self.torch, requires_grad=True).exp().backward()
        gpus = comm.allgather(str(torch.cuda.get_device_properties(self.torch).uuid))
        self.messages = messages
        self.direct = messages == "direct" or (messages == "auto" and bool(comm.allreduce(cuda_aware(), MPI.LAND)))
        self.shared = f", {len(gpus)} ranks on {len(set(gpus))}" if len(set(gpus)) < len(gpus) else ""
        # Last, after all collective calls: it may raise on one rank while the drivers of other ranks support words.
        self.all_words = StreamWords(self.host, CudaStreamOperations()) if words else None

    @property
    def description(self) -> str:
        """The GPU, how many ranks share GPUs, and the path of messages."""
        how = "MPI takes GPU tensors as they are" if self.direct else "messages go through pinned host memory"
        return f"device: {torch.cuda.get_device_name(self.torch)}{self.shared}; {how}"

    def mark(self) -> Mark | None:
        """An event in the current stream, or a word that it writes."""
        words = self.words  # read once: another thread may end the use of words
        return _Event() if words is None else words.mark()

    def copies(self, out: bool) -> contextlib.AbstractContextManager[object]:
        """One stream for each direction: a GPU copies both ways at once."""
        return torch.cuda.stream(self.copy_streams[out])

    def sums(self) -> contextlib.AbstractContextManager[object]:
        """A separate stream: that of computations may be waiting for a message of a rank that waits for the sum."""
        return torch.cuda.stream(self.sum_stream)

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

    def release(self) -> None:
        """Empty the cache of torch's allocator."""
        torch.cuda.empty_cache()

    def graph(self, draws: int) -> CudaGraph:
        """A CUDA graph."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self.torch, self.pool, draws)

    def _memory(self, address: int, size: int) -> Tensor:
        return torch.as_tensor(_Memory(address, size), device=self.torch)

    def use_in_thread(self) -> None:
        """Make this GPU current: a new thread begins with GPU 0."""
        torch.cuda.set_device(self.torch)

    def be_deterministic(self) -> None:
        """As torch's notes on reproducibility say; cuBLAS reads its variable when it is first used."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    def try_messages(self, comm: MPI.Intracomm) -> None:
        """If the trial fails, messages go through host memory with `auto`; UsageError with `direct`."""
        if self.direct and not messages_arrive(comm, self.torch):
            if self.messages == "direct":
                raise UsageError("gpu messages direct: MPI did not deliver GPU memory intact: take gpu messages host")
            self.direct = False

    def reserved(self) -> int:
        """The most bytes that torch's caching allocator held."""
        return torch.cuda.max_memory_reserved(self.torch)


def number_on_host(comm: MPI.Intracomm) -> int:
    """A rank's number on its host: the launcher's, or the number of lower ranks on the host. Collective."""
    numbers, here = comm.allgather(local_rank(os.environ)), ranks_on_host(comm)
    number, said = numbers[comm.rank], {numbers[rank] for rank in here}
    # Ranks that inherit one variable of another launcher all have the same number.
    return number if number is not None and None not in said and len(said) == len(here) else here.index(comm.rank)


def ranks_on_host(comm: MPI.Intracomm) -> list[int]:
    """The ranks that run on this rank's host. Collective.

    MPI cannot be asked: with MPIR_CVAR_NOLOCAL it treats ranks of one host as if they were on several.
    """
    hosts = comm.allgather(MPI.Get_processor_name())
    return [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]


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


def choose_device(comm: MPI.Intracomm, name: str, messages: str, words: bool = False) -> Device:
    """The device of this rank. Collective; UsageError if an option needs something that is missing here.

    name      cpu, cuda, or auto: a GPU if every rank has one
    messages  a value of --gpu-messages
    words     stream words replace events
    """
    found = comm.allgather((torch.cuda.is_available(), MPI.Get_processor_name()))
    without = [(rank, host) for rank, (available, host) in enumerate(found) if not available]
    if name == "cuda" and without:
        rank, host = without[0]
        raise UsageError(f"device cuda: torch finds no GPU for rank {rank} on {host}")
    if without or name == "cpu":
        if words:
            raise UsageError("stream words: a CPU has no streams of kernels")
        if messages != "auto":
            raise UsageError(f"gpu messages {messages}: a CPU has no memory but the host's")
        if name == "auto" and len(without) < comm.size:
            rank, host = without[0]
            note(comm, f"torch finds a GPU for some ranks, but none for rank {rank} on {host}: all take CPUs")
        return Device()
    if words and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError("stream words: this MPI lacks MPI_THREAD_MULTIPLE, and a second thread has to write the words")
    return Cuda(comm, messages, words)
