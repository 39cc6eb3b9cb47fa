"""Messages from and to the memory of a GPU, whose kernels run later than they are launched.

1. A send or a receive begins when the GPU has reached a *mark*: all kernels launched before the call are done.
2. If MPI cannot read the GPU's memory, as `device.py` decides, messages go through pinned host memory, by copies in
   streams of their own. A send's copy waits for the kernels before the call, and the send for the copy.
3. A received message *arrives* in the stream of the caller who asks for it: kernels launched from then on wait for its
   copy, the host does not. With words (`stream_words`) the host does not wait for the message either: the stream does.
4. Sums over ranks are added up in a stream of their own, and their sends wait for that stream alone. Queued after a
   send of the list, they might wait for kernels that wait for a message from the rank that the sum is sent to.

What could go wrong, and what prevents it, for messages that MPI takes from GPU memory (direct) or that go through the
host, with events or with words:

    hazard                          direct                              host
    ------------------------------  ----------------------------------  ---------------------------------------------
    MPI sends before kernels have   the send begins at a mark           the copy's stream waits for the mark, the send
    written the tensor                                                  begins at a mark after the copy
    kernels change the tensor       none is launched before `done`: FREE and STEP wait for it
    before it is sent
    MPI writes while kernels still  the receive begins at a mark        the same mark: then MPI writes host memory, and
    read the old values                                                 the copy to the GPU follows
    kernels read before the message events: the host waits for MPI      events: the host waits until the copy is
    is there                        words: the stream waits for a       launched, the stream for the copy's mark
                                    number that the thread writes       words: the stream waits for a number that the
                                                                        copy's stream writes
    the next message overwrites     there is no host memory             a place in a mirror stands for GPU memory: the
    host memory that is still read                                      mark of the next receive is after the last copy
    a sum waits behind a send of    its transfers have queues, and its additions a stream, of their own
    the list, and ranks in a circle
    a stream that waits for a word  words are used only in passes that neither allocate nor load kernels; if the thread
    blocks the host or the thread   fails, it aborts all ranks

A thread polls marks and messages, and advances sums, so that a transfer begins when its kernels end, whatever the
launching thread does. If MPI allows only one thread, the launching thread does this whenever it polls.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.device import Device, Mark
from mpirun.comm.message import mpi_buffer
from mpirun.comm.stream_words import Number, Word
from mpirun.comm.transport import Receive, Transport
from mpirun.comm.waiting import Done, punctual_naps

WIDEST = 16  # bytes: host memory begins at a multiple of it in the block, so that every type stays aligned
SWITCH = 50e-6  # seconds: how long one thread of Python keeps the others waiting
NAP = 20e-6  # seconds between two polls by the thread


class Mirror:
    """Pinned host memory for messages that are received anywhere in one block of a GPU's memory."""

    def __init__(self, device: Device) -> None:
        """Memory is allocated at the first use, when all that is received into the block is known."""
        self.device, self.begin, self.end = device, 0, 0
        self.memory: Tensor | None = None

    def cover(self, tensor: Tensor) -> None:
        """Extend the mirror to the part of the block that `tensor` takes."""
        begin = int(tensor.storage_offset()) * tensor.element_size() // WIDEST * WIDEST
        self.begin = begin if self.end == self.begin else min(self.begin, begin)
        self.end = max(self.end, int(tensor.storage_offset()) * tensor.element_size() + tensor.nbytes)

    def of(self, tensor: Tensor) -> Tensor:
        """The host memory that stands for this part of the block."""
        if self.memory is None:
            self.memory = self.device.host(self.end - self.begin)
        begin = int(tensor.storage_offset()) * tensor.element_size() - self.begin
        return self.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Transfer:
    """A message in flight: `begin` starts it once `mark` is reached, `end` is called when MPI is done with it."""

    __slots__ = ("arrived", "begin", "done", "end", "mark", "promise", "request")
    request: MPI.Request

    def __init__(
        self, mark: Mark | None, begin: Callable[[], MPI.Request], end: Callable[[], Mark | None] = lambda: None
    ) -> None:
        """`end` returns a mark after the work that is left on the GPU; None: none is left."""
        self.mark, self.begin, self.end = mark, begin, end
        self.done = False  # as far as the host is concerned
        self.arrived: Mark | None = None
        self.promise: Number | None = None  # a number that a word gets when the message has arrived

    def begun(self) -> bool:
        """Begin if the mark is reached; return whether the transfer has begun."""
        if self.mark is not None and not self.mark.reached():
            return False
        self.request = self.begin()
        return True

    def ended(self) -> bool:
        """End if MPI is done with the message; return whether the transfer has ended."""
        if not self.request.Test():
            return False
        self.arrived = self.end()
        self.done = True
        return True

    def arrive(self) -> bool:
        """Return whether it has ended; kernels launched from then on wait for the work that is left."""
        if self.done and self.arrived is not None:
            self.arrived.arrive()
        return self.done


class ReceivedMessage:
    """A message that is received into the memory of a tensor any number of times."""

    def __init__(
        self,
        device: Device,
        tensor: Tensor,
        mirror: Mirror | None,
        word: Word | None,
        make_request: Callable[[Tensor], MPI.Prequest],
        enqueue: Callable[[Transfer], None],
    ) -> None:
        """`make_request`: makes the request for the memory that MPI writes; `enqueue`: queues a transfer.

        `mirror`: has that memory; None: it is the tensor's; `word`: gets a number when the message has arrived.
        """
        self.device, self.tensor, self.mirror, self.word = device, tensor, mirror, word
        self.make_request, self.enqueue = make_request, enqueue
        # Autograd must not see the copy, as it sees no message: a graph may have saved the weights.
        self.into, self.written = tensor.data, tensor
        self.request: MPI.Prequest | None = None
        self.transfer: Transfer | None = None  # the latest

    def start(self) -> None:
        """As `Receive.start`."""
        promise = self.word.next() if self.word is not None and self.device.words is not None else None
        self.transfer = Transfer(self.device.mark(), self._begin, lambda: self._end(promise))
        self.transfer.promise = promise
        self.enqueue(self.transfer)

    def done(self) -> bool:
        """As `Receive.done`."""
        transfer = self.transfer
        if transfer is not None and transfer.promise is not None:
            if self.device.words is None and not transfer.promise.reached():
                return False  # words are not used any more
            transfer.promise.arrive()
            return True
        return transfer is not None and transfer.arrive()

    def _begin(self) -> MPI.Request:
        if self.request is None:
            if self.mirror is not None:
                self.written = self.mirror.of(self.tensor)
            self.request = self.make_request(self.written)
        self.request.Start()
        return self.request

    def _end(self, promise: Number | None) -> Mark | None:
        if self.mirror is None:
            if promise is not None:
                promise.keep()
            return None
        with self.device.copies(out=False):  # kernels that read the old values are done: `_begin` waited for them
            self.into.copy_(self.written, non_blocking=True)
            if promise is None:
                return self.device.mark()
            promise.keep_in_stream()
            return None


class QueuedTransport(Transport):
    """Sends and receives begin when the GPU has reached them, each in call order; those of sums have separate queues.

    Messages to the same GPU memory go through the same host memory.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sends: deque[Transfer] = deque()  # those that have not begun
        self.receives_to_begin: deque[Transfer] = deque()
        self.sends_of_sums: deque[Transfer] = deque()
        self.receives_of_sums: deque[Transfer] = deque()
        self.under_way: list[Transfer] = []
        self.mirrors: dict[int, Mirror] = {}  # by block of GPU memory, the last one made
        self.advancing = threading.Lock()
        self.busy = threading.Event()  # set: there may be something to advance
        self.failure: BaseException | None = None  # of the thread
        self.thread: threading.Thread | None = None
        punctual_naps()
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.moves_alone = True
            self.switch_before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH)
            self.thread = threading.Thread(target=self._run, name="transfers", daemon=True)
            self.thread.start()

    def send(
        self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None, summed: bool = False
    ) -> Done:
        """As `Transport.send`."""
        source, mark = tensor, self.device.mark()
        if not self.device.direct:
            source = self.device.host(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            with contextlib.nullcontext() if summed else self.device.copies(out=True):
                if mark is not None:
                    mark.arrive()
                source.copy_(tensor, non_blocking=True)
                mark = self.device.mark()
        transfer = Transfer(mark, lambda: (comm or self.comm).Isend(mpi_buffer(source), peer, tag))
        self._enqueue(self.sends_of_sums if summed else self.sends, transfer)
        return lambda: transfer.done

    def receive(
        self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None, summed: bool = False
    ) -> Receive:
        """As `Transport.receive`; the host waits for messages of sums even with words."""
        queue = self.receives_of_sums if summed else self.receives_to_begin
        mirror = None if self.device.direct else self._mirror(tensor)
        word = self.device.all_words.word() if self.device.all_words is not None and comm is None else None
        make_request = partial(self._persistent, peer=peer, tag=tag, comm=comm)
        message = ReceivedMessage(self.device, tensor, mirror, word, make_request, partial(self._enqueue, queue))
        return Receive(message.start, message.done)

    def receive_once(self, tensor: Tensor, peer: int, tag: int) -> Done:
        """As `Transport.receive_once`, for a tensor of one dimension; the host waits for it even with words."""
        written = tensor if self.device.direct else self.device.host(tensor.nbytes).view(tensor.dtype)

        def end() -> Mark | None:
            with self.device.copies(out=False):
                tensor.copy_(written, non_blocking=True)  # onto itself it does nothing
                return self.device.mark()

        transfer = Transfer(self.device.mark(), lambda: self.comm.Irecv(mpi_buffer(written), peer, tag), end)
        self._enqueue(self.receives_to_begin, transfer)
        return transfer.arrive

    def _mirror(self, tensor: Tensor) -> Mirror:
        """The mirror of the block that a tensor lies in; a new one if the last has allocated its memory."""
        block = tensor.untyped_storage().data_ptr()
        if block not in self.mirrors or self.mirrors[block].memory is not None:
            self.mirrors[block] = Mirror(self.device)
        self.mirrors[block].cover(tensor)
        return self.mirrors[block]

    def _enqueue(self, queue: deque[Transfer], transfer: Transfer) -> None:
        queue.append(transfer)
        self.busy.set()
        if self.thread is None:
            self.advance()  # not `poll`: the background may be what starts this transfer

    def poll(self) -> None:
        """As `Transport.poll`, after an `advance`. An exception of the thread is raised here."""
        self.advance()
        if self.failure is not None:
            raise self.failure
        super().poll()

    def moves(self) -> bool:
        """As `Transport.moves`."""
        self.poll()
        return self.advance()

    def advance(self) -> bool:
        """Begin transfers that the GPU has reached, end those that MPI is done with; return whether some are left."""
        if not self.advancing.acquire(blocking=False):
            return True  # another thread does it
        try:
            queues = self.sends, self.receives_to_begin, self.sends_of_sums, self.receives_of_sums
            for queue in queues:
                while queue and queue[0].begun():
                    self.under_way.append(queue.popleft())
            self.under_way = [transfer for transfer in self.under_way if not transfer.ended()]
            return bool(self.under_way or any(queues))
        finally:
            self.advancing.release()

    def _advance_all(self) -> bool:
        """`advance`, then advance sums, which may queue their next transfers; return whether anything is left."""
        left = self.advance()
        return (self.background is not None and self.background()) or left

    def free(self) -> None:
        """As `Transport.free`, after all transfers and the thread have ended."""
        self.wait(lambda: not self.advance())  # with words a receive counts as done before its message arrives
        thread, self.thread = self.thread, None
        if thread is not None:
            self.busy.set()
            thread.join()
            sys.setswitchinterval(self.switch_before)
        super().free()

    def _run(self) -> None:
        punctual_naps()
        self.device.use_in_thread()
        try:
            while self.thread is not None:
                self.busy.wait()
                self.busy.clear()
                while self.thread is not None and self._advance_all():
                    time.sleep(NAP)
        except BaseException as error:
            self.failure = error
            if self.device.words is not None:  # a stream may wait for a word forever; else the next poll raises it
                traceback.print_exc()
                self.comm.Abort(1)


def make_transport(*arguments: Any, device: Device) -> Transport:
    """The transport for tensors on a device, with the arguments of `Transport`. Collective."""
    return (Transport if device.kind == "cpu" else QueuedTransport)(*arguments, device=device)
