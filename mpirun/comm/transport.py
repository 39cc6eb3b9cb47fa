"""Messages: point to point, non-blocking, straight from and into the memory of tensors.

The tag of a message is the kind of its buffer. MPI keeps messages of one tag between two ranks in order, and a
schedule needs no more than that. MPI need not know a tensor's type: its bytes are counted in the widest numbers that
divide them. A receive fills the same memory in every step, so it is a persistent request that is made once.

`Transport` is for memory that MPI may touch at once. `QueuedTransport` is for GPUs: a transfer begins when the GPU
has executed the work that was launched before it, and goes through pinned host memory if MPI cannot read the GPU's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.device import Device, Mark
from mpirun.comm.message import mpi_buffer
from mpirun.comm.waiting import CROWDED_SPIN, SPIN, Done, spin_then_sleep

UNUSED_TAG = 99  # no message has it: a probe for it only lets MPI go on with the others
ALIGN = 16  # bytes: where host memory begins in its block, so that numbers of every type lie as they do there
NO_ROW = -1  # of a transfer that no single instruction of this rank has started, as those of sums


class Receive(NamedTuple):
    """A receive that is done once a step: call `start`, then ask `done`."""

    start: Callable[[], None]
    done: Done


class Transport:
    """A rank's sends and receives, and its waits for them."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        groups: Sequence[Sequence[int]],
        crowded: bool = True,
        on_wait: Callable[[int | None], None] = lambda row: None,
    ) -> None:
        """Collective: it makes a communicator of its own and one for each group of ranks.

        crowded  there are more ranks on this host than cores
        on_wait  called when a wait begins, with the row of the instruction that started the transfer or NO_ROW, and
                 when it ends, with None
        """
        self.comm = comm.Dup()
        self.on_wait = on_wait
        self.spin = CROWDED_SPIN if crowded else SPIN
        world = comm.Get_group()
        self.groups = [
            comm.Create_group(world.Incl(list(members)), tag) if comm.rank in members else None
            for tag, members in enumerate(groups)
        ]
        self.receives: list[MPI.Prequest] = []
        self.waited = 0.0  # seconds, all waits together
        self.background: Callable[[], None] | None = None  # advances allreduces: every poll calls it

    def group(self, index: int) -> MPI.Intracomm:
        """The communicator of a group of the schedule that this rank is a member of."""
        comm = self.groups[index]
        assert comm is not None
        return comm

    def send(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Done:
        """Start sending; the tensor must neither change nor be freed until that is done."""
        return (comm or self.comm).Isend(mpi_buffer(tensor), peer, tag).Test

    def receive(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Receive:
        """A receive into the memory of a tensor, which the caller keeps alive; nothing arrives before its `start`."""
        request = self._persistent(tensor, peer, tag, comm)
        return Receive(request.Start, request.Test)

    def _persistent(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None) -> MPI.Prequest:
        self.receives.append((comm or self.comm).Recv_init(mpi_buffer(tensor), peer, tag))
        return self.receives[-1]

    def free(self) -> None:
        """Give back what MPI has for this transport, which is used no more; nothing is under way. Collective."""
        for request in self.receives:
            request.Free()
        self.receives.clear()
        for comm in (*self.groups, self.comm):
            if comm is not None:
                comm.Free()
        self.groups.clear()

    def wait(self, done: Done, row: int = NO_ROW) -> None:
        """Return when a transfer is done; `row`: of the instruction that started it."""
        if not done():
            self._wait(done, row)

    def _wait(self, done: Done, row: int) -> None:
        begin = time.perf_counter()
        self.on_wait(row)
        spin_then_sleep(done, self.poll, self.spin)
        self.on_wait(None)
        self.waited += time.perf_counter() - begin

    def poll(self) -> None:
        """Let MPI go on with all transfers, and the allreduces with what has arrived."""
        self.comm.Iprobe(MPI.ANY_SOURCE, UNUSED_TAG)
        if self.background is not None:
            self.background()


class Mirror:
    """Pinned host memory for what arrives in one block of a GPU's memory, wherever in it."""

    def __init__(self, device: Device) -> None:
        """It has no memory before it is first used, when all that arrives in the block is known."""
        self.device, self.begin, self.end = device, 0, 0
        self.memory: Tensor | None = None

    def cover(self, tensor: Tensor) -> None:
        """Have memory for this part of the block, too."""
        begin = int(tensor.storage_offset()) * tensor.element_size() // ALIGN * ALIGN
        self.begin = begin if self.end == self.begin else min(self.begin, begin)
        self.end = max(self.end, int(tensor.storage_offset()) * tensor.element_size() + tensor.nbytes)

    def of(self, tensor: Tensor) -> Tensor:
        """The host memory that stands for this part of the block."""
        if self.memory is None:
            self.memory = self.device.host(self.end - self.begin)
        begin = int(tensor.storage_offset()) * tensor.element_size() - self.begin
        return self.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class QueuedTransport(Transport):
    """For a GPU: transfers begin in the order of the calls, each when the GPU has done the work launched before.

    What arrives in one place of the GPU's memory, one message after the other, goes through one place of the host's.
    """

    def __init__(self, device: Device, *arguments: Any) -> None:
        """`device`: of the tensors; `arguments`: those of `Transport`."""
        super().__init__(*arguments)
        self.device = device
        self.queue: deque[tuple[Mark | None, Callable[[], None]]] = deque()
        self.mirrors: dict[int, Mirror] = {}  # by block of memory, those that have no memory yet

    def send(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Done:
        """As `Transport.send`; a host copy is made here if MPI cannot read the GPU's memory."""
        source = tensor
        if not self.device.direct:
            source = self.device.host(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            source.copy_(tensor, non_blocking=True)
        begun: list[Any] = []
        self._enqueue(lambda: begun.extend([(comm or self.comm).Isend(mpi_buffer(source), peer, tag), source]))
        return lambda: bool(begun) and begun[0].Test()

    def receive(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Receive:
        """As `Transport.receive`; a message that arrives in host memory is copied to the GPU when it is done."""
        mirror = None if self.device.direct else self._mirror(tensor)
        into = tensor.data  # autograd must not see this copy, as it sees no message: a graph may have saved the weights
        target: Tensor | None = None
        request: MPI.Prequest | None = None
        begun = False

        def begin() -> None:
            nonlocal begun, request, target
            if request is None:
                target = tensor if mirror is None else mirror.of(tensor)
                request = self._persistent(target, peer, tag, comm)
            request.Start()
            begun = True

        def start() -> None:
            nonlocal begun
            begun = False
            self._enqueue(begin)

        def done() -> bool:
            if not begun or request is None or not request.Test():
                return False
            if target is not None and target is not tensor:
                into.copy_(target, non_blocking=True)
            return True

        return Receive(start, done)

    def _mirror(self, tensor: Tensor) -> Mirror:
        """The mirror of the block that a tensor lies in; a new one if the last has its memory already."""
        block = tensor.untyped_storage().data_ptr()
        if block not in self.mirrors or self.mirrors[block].memory is not None:
            self.mirrors[block] = Mirror(self.device)
        self.mirrors[block].cover(tensor)
        return self.mirrors[block]

    def _enqueue(self, begin: Callable[[], None]) -> None:
        self.queue.append((self.device.mark(), begin))
        self._begin_reached()  # not `poll`: the background may be what starts this transfer

    def poll(self) -> None:
        """As `Transport.poll`, after beginning the transfers that the GPU has come to."""
        self._begin_reached()
        super().poll()

    def _begin_reached(self) -> None:
        while self.queue and ((mark := self.queue[0][0]) is None or mark.reached()):
            self.queue.popleft()[1]()


def make_transport(device: Device, *arguments: Any) -> Transport:
    """The transport for tensors on a device; `arguments`: those of `Transport`. Collective."""
    return Transport(*arguments) if device.kind == "cpu" else QueuedTransport(device, *arguments)
