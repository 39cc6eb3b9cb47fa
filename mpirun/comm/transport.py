"""Messages: matched, non-blocking, straight from and into tensors' memory.

Every kind of buffer has one tag, and MPI keeps messages of one tag between
two ranks in order, which is all that a schedule needs. Tensors travel as
bytes of their element size, so MPI never has to know a type. Receives go to
the same memory in every step and are persistent requests, made once.

`Transport` is for memory that MPI may touch at once. `Queued` is for GPUs: a
transfer begins when the GPU has come to where the list started it, and goes
through host memory where MPI knows no GPUs.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.device import Device, Mark
from mpirun.watchdog import NOTHING, OTHERS, WAIT, WORDS

# Integers of an element's size, so that a count stays small and bf16 travels too.
_TYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
# Seconds for which a rank that waits asks again and again, yielding its core at every turn, before it sleeps: with
# a core for every rank, and with more ranks than cores.
SPIN, CROWDED_SPIN = 2e-3, 50e-6
NAP = 50e-6  # seconds it then sleeps at a time
IDLE = 99  # a tag that no message has: asking for it only moves others on

Done = Callable[[], bool]  # whether a transfer is done; asked until it is, and MPI moves it on meanwhile


def view(tensor: Tensor) -> list[Any]:
    """An MPI buffer over a contiguous tensor's memory. It does not keep the tensor alive: the caller does."""
    assert tensor.is_contiguous()
    width = tensor.element_size()
    count = tensor.numel()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), count * width), count, _TYPES[width]]


class Receive(NamedTuple):
    """A receive that is done once a step: `start` it, then ask whether it is `done`."""

    start: Callable[[], None]
    done: Done


class Transport:
    def __init__(
        self,
        comm: MPI.Intracomm,
        groups: Sequence[Sequence[int]],
        crowded: bool = True,
        state: memoryview | None = None,
    ) -> None:
        """`crowded`: there are more ranks here than cores. `state`: where to show what is waited for."""
        self.comm = comm.Dup()
        self.state = memoryview(bytearray(8 * WORDS)).cast("q") if state is None else state
        self.spin = CROWDED_SPIN if crowded else SPIN
        world = comm.Get_group()
        self.groups = [
            comm.Create_group(world.Incl(list(members)), tag) if comm.rank in members else None
            for tag, members in enumerate(groups)
        ]
        self.waited = 0.0  # seconds, all waits together
        self.background: Callable[[], None] | None = None  # work of several steps: `poll` goes on with it

    def group(self, index: int) -> MPI.Intracomm:
        """The communicator of one of the schedule's groups, which this rank is in."""
        comm = self.groups[index]
        assert comm is not None
        return comm

    def send(self, tensor: Tensor, peer: int, kind: int, comm: MPI.Intracomm | None = None) -> Done:
        """Start sending; the tensor must neither change nor go until that is done."""
        return (comm or self.comm).Isend(view(tensor), peer, kind).Test

    def receive(self, tensor: Tensor, peer: int, kind: int, comm: MPI.Intracomm | None = None) -> Receive:
        """A receive into a tensor's memory."""
        request = (comm or self.comm).Recv_init(view(tensor), peer, kind)
        return Receive(request.Start, request.Test)

    def wait(self, done: Done, row: int = OTHERS) -> None:
        """`row`: the instruction that started what is waited for."""
        if not done():
            self._wait(done, row)

    def _wait(self, done: Done, row: int) -> None:
        """Yields the core at every turn, then sleeps: with more ranks than cores others compute meanwhile."""
        begin = time.perf_counter()
        self.state[WAIT] = row
        naps = begin + self.spin
        while not done():
            self.poll()
            if time.perf_counter() < naps:
                os.sched_yield()
            else:
                time.sleep(NAP)
        self.state[WAIT] = NOTHING
        self.waited += time.perf_counter() - begin

    def poll(self) -> None:
        """Go on with all that is under way."""
        self.comm.Iprobe(MPI.ANY_SOURCE, IDLE)
        if self.background is not None:
            self.background()


class Queued(Transport):
    """For a GPU: transfers begin when the GPU has come to them, in the order in which they were given."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        groups: Sequence[Sequence[int]],
        device: Device,
        crowded: bool,
        state: memoryview | None = None,
    ) -> None:
        super().__init__(comm, groups, crowded, state)
        self.device = device
        self.queue: deque[tuple[Mark | None, Callable[[], None]]] = deque()

    def send(self, tensor: Tensor, peer: int, kind: int, comm: MPI.Intracomm | None = None) -> Done:
        source = tensor
        if not self.device.direct:
            source = self._staged(tensor)
            source.copy_(tensor, non_blocking=True)
        begun: list[Any] = []
        self._enqueue(lambda: begun.extend([(comm or self.comm).Isend(view(source), peer, kind), source]))
        return lambda: bool(begun) and begun[0].Test()

    def receive(self, tensor: Tensor, peer: int, kind: int, comm: MPI.Intracomm | None = None) -> Receive:
        target = tensor if self.device.direct else self._staged(tensor)
        request = (comm or self.comm).Recv_init(view(target), peer, kind)
        into = tensor.data  # as a message does, unseen by autograd: a graph may have saved weights that come again
        begun = False

        def begin() -> None:
            nonlocal begun
            request.Start()
            begun = True

        def start() -> None:
            nonlocal begun
            begun = False
            self._enqueue(begin)

        def done() -> bool:
            if not begun or not request.Test():
                return False
            if target is not tensor:
                into.copy_(target, non_blocking=True)
            return True

        return Receive(start, done)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor."""
        return self.device.host(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)

    def _enqueue(self, begin: Callable[[], None]) -> None:
        self.queue.append((self.device.mark(), begin))
        self._begin()  # not `poll`: it may be the background that starts a transfer

    def poll(self) -> None:
        self._begin()
        super().poll()

    def _begin(self) -> None:
        """Begin what the GPU has come to."""
        while self.queue and ((mark := self.queue[0][0]) is None or mark.reached()):
            self.queue.popleft()[1]()


def transport(
    comm: MPI.Intracomm, groups: Sequence[Sequence[int]], device: Device, crowded: bool, state: memoryview | None
) -> Transport:
    """The one for a device."""
    if device.kind == "cpu":
        return Transport(comm, groups, crowded, state)
    return Queued(comm, groups, device, crowded, state)
