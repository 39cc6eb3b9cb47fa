"""Messages: point to point, non-blocking, straight from and into the memory of tensors.

The tag of a message is the kind of its buffer. MPI keeps messages of one tag between two ranks in order, and a
schedule needs no more than that. MPI need not know a tensor's type: its bytes are counted in the widest numbers that
divide them. A receive that fills the same memory in every step is a persistent request, made once.
Every request keeps its tensor alive (`message`): no caller has to.

`Transport` is for memory that MPI may access at once; `gpu_transport.py` has the transport for GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.device import Device
from mpirun.comm.message import mpi_buffer
from mpirun.comm.waiting import CROWDED_SPIN, SPIN, Done, spin_then_sleep

UNUSED_TAG = 99  # no message has it: a probe for it only lets MPI make progress on the others
NO_ROW = -1  # of a transfer that no single instruction of this rank has started, such as one of a sum
AT_ONCE = 2**12  # bytes: smaller messages are sent eagerly by any MPI, even while ranks compute

OnWait = Callable[[int | None], None]  # takes a row or, when the wait ends, None: see `Transport`


class Receive(NamedTuple):
    """A receive that can be repeated: call `start`, then ask `done`."""

    start: Callable[[], None]
    done: Done


class Transport:
    """A rank's sends and receives, and its waits for them."""

    moves_alone = False  # whether messages progress while the rank computes without polling

    def __init__(
        self,
        comm: MPI.Intracomm,
        groups: Sequence[Sequence[int]],
        crowded: bool = True,
        on_wait: OnWait = lambda row: None,
        *,
        device: Device | None = None,
    ) -> None:
        """Collective: it makes a communicator of its own and one for each group of ranks.

        crowded  there are more ranks on this host than cores
        on_wait  called when a wait begins, with the row of the instruction that started the transfer or NO_ROW, and
                 when it ends, with None
        device   of the tensors; None: the CPU
        """
        self.comm, self.device = comm.Dup(), device or Device()
        self.on_wait = on_wait
        self.spin = CROWDED_SPIN if crowded else SPIN
        self.groups = [
            _communicator(comm, members, tag) if comm.rank in members else None for tag, members in enumerate(groups)
        ]
        self.receives: list[MPI.Prequest] = []
        self.watched: list[Done] | None = None  # since `watch`, larger messages that may be in flight
        self.waited = 0.0  # seconds, all waits together
        # Advances allreduces; every poll calls it, and so does a transport's thread. Returns whether to call it again.
        self.background: Callable[[], bool] | None = None

    def group(self, index: int) -> MPI.Intracomm:
        """The communicator of a group of the schedule that this rank is a member of."""
        comm = self.groups[index]
        assert comm is not None
        return comm

    def send(
        self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None, summed: bool = False
    ) -> Done:
        """Start sending; the tensor must not change until the send is done.

        comm    the communicator of a group, for a sum over the group
        summed  the tensor has been added up in the stream of the device's `sums`
        """
        done = (comm or self.comm).Isend(mpi_buffer(tensor), peer, tag).Test
        if self.watched is not None and tensor.nbytes >= AT_ONCE:
            self.watched.append(done)
        return done

    def receive(
        self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None, summed: bool = False
    ) -> Receive:
        """A receive into the memory of a tensor, which is kept until `free`; nothing arrives before its `start`."""
        request, large = self._persistent(tensor, peer, tag, comm), tensor.nbytes >= AT_ONCE

        def start() -> None:
            request.Start()
            if large and self.watched is not None:
                self.watched.append(request.Test)

        return Receive(start if large else request.Start, request.Test)

    def receive_once(self, tensor: Tensor, peer: int, tag: int) -> Done:
        """Start receiving into the memory of a tensor, by a request that is made for this message alone."""
        done = self.comm.Irecv(mpi_buffer(tensor), peer, tag).Test
        if self.watched is not None and tensor.nbytes >= AT_ONCE:
            self.watched.append(done)
        return done

    def watch(self) -> None:
        """From now on `moves` tracks messages that start, and has to be called now and then."""
        self.watched = []

    def moves(self) -> bool:
        """Let MPI make progress; return whether messages are in flight that need such calls."""
        self.poll()
        self.watched = [done for done in self.watched or () if not done()]
        return bool(self.watched)

    def _persistent(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None) -> MPI.Prequest:
        self.receives.append((comm or self.comm).Recv_init(mpi_buffer(tensor), peer, tag))
        return self.receives[-1]

    def free(self) -> None:
        """Free the MPI resources; nothing may be in flight, and the transport may not be used again. Collective."""
        for request in self.receives:
            request.Free()
        self.receives.clear()
        for comm in (*self.groups, self.comm):
            if comm is not None:
                comm.Free()
        self.groups.clear()

    def wait(self, done: Done, row: int = NO_ROW) -> None:
        """Block until a transfer is done; `row`: of the instruction that started it."""
        if done():
            return
        begin = time.perf_counter()
        self.on_wait(row)
        spin_then_sleep(done, self.poll, self.spin)
        self.on_wait(None)
        self.waited += time.perf_counter() - begin

    def poll(self) -> None:
        """Let MPI make progress on all transfers, and advance allreduces by what has arrived."""
        self.comm.Iprobe(MPI.ANY_SOURCE, UNUSED_TAG)
        if self.background is not None:
            self.background()


def _communicator(comm: MPI.Intracomm, members: Sequence[int], tag: int) -> MPI.Intracomm:
    """A communicator of some ranks. Collective over these; those of one call differ in their tags."""
    world = comm.Get_group()
    group = world.Incl(list(members))
    made = comm.Create_group(group, tag)
    group.Free()
    world.Free()
    return made
