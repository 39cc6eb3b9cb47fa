"""MPI as a transport that delivers in order.

In each communicator one operation is under way at a time, in the order of issue. A send is an Issend, which blocks
those behind it until it is received, and all have one tag, so position decides what a receive meets. Sums have
communicators of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpi4py import MPI

from mpirun.comm.message import mpi_buffer
from mpirun.comm.transport import Receive, Transport

QUEUES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {  # of a sender, a receiver and a kind
    "in-order:one": lambda a, b, kind: (),
    "in-order:rank": lambda a, b, kind: (),
    "in-order:pair": lambda a, b, kind: (min(a, b), max(a, b)),
    "in-order:edge": lambda a, b, kind: (a, b),
    "in-order:edge-kind": lambda a, b, kind: (a, b, kind),
}


class Operation:
    def __init__(self, post: Callable[[], MPI.Request]) -> None:
        self.post, self.request, self.is_done = post, None, False

    def advance(self) -> bool:
        self.request = self.request or self.post()
        self.is_done = self.request.Test()
        return self.is_done


class InOrderTransport(Transport):
    """`name`: one of QUEUES; the other arguments are those of Transport."""

    def __init__(self, name: str, *arguments, **named):
        super().__init__(*arguments, **named)
        self.queue_of = QUEUES[name]
        self.queues: dict[tuple[int, ...], deque[Operation]] = {}

    def issue(self, a: int, b: int, kind: int, post: Callable[[], MPI.Request]) -> Operation:
        operation = Operation(post)
        self.queues.setdefault(self.queue_of(a, b, kind), deque()).append(operation)
        self.advance()
        return operation

    def advance(self) -> None:
        for queue in self.queues.values():
            while queue and queue[0].advance():
                queue.popleft()

    def send(self, tensor, peer, tag, comm=None, summed=False):
        if comm is not None:
            return super().send(tensor, peer, tag, comm, summed)
        sent = self.issue(self.comm.rank, peer, tag, lambda: self.comm.Issend(mpi_buffer(tensor), peer, 0))
        return lambda: self.advance() or sent.is_done

    def receive(self, tensor, peer, tag, comm=None, summed=False):
        if comm is not None:
            return super().receive(tensor, peer, tag, comm, summed)
        received: list[Operation] = []

        def start() -> None:
            post = lambda: self.comm.Irecv(mpi_buffer(tensor), peer, 0)  # noqa: E731
            received[:] = [self.issue(peer, self.comm.rank, tag, post)]

        return Receive(start, lambda: self.advance() or all(each.is_done for each in received))

    def poll(self) -> None:
        super().poll()
        self.advance()
