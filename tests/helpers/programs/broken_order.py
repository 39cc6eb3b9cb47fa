"""Faults in the order of transfers and late kernels, by name: each leaves out or misplaces something."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any
from unittest import mock

from late_device import Late, Launches
from late_streams import COMPUTE, Event, WordOperations

from mpirun.comm.gpu_transport import QueuedTransport, Transfer
from mpirun.comm.ordered_allreduce import OrderedAllreduce
from mpirun.comm.stream_words import Number, StreamWords
from mpirun.comm.transport import Receive

receive, enqueue = QueuedTransport.receive, QueuedTransport._enqueue
arrive, copy = Event.arrive, Launches.copy
mark, keep_in_stream = StreamWords.mark, Number.keep_in_stream


def receive_that_is_done_at_once(self: QueuedTransport, *arguments: Any) -> Receive:
    return receive(self, *arguments)._replace(done=lambda: True)


def enqueue_receives_without_mark(self: QueuedTransport, queue: deque[Transfer], transfer: Transfer) -> None:
    if queue is self.receives_to_begin:
        transfer.mark = None
    enqueue(self, queue, transfer)


def arrive_in_compute_only(self: Event) -> None:
    if self.streams.current == COMPUTE:
        arrive(self)


def arrive_in_copies_only(self: Event) -> None:
    if self.streams.current != COMPUTE:
        arrive(self)


def copy_elsewhere(self: Launches, *arguments: Any) -> Any:
    stream = self.streams.current
    with self.streams.using(stream if stream == COMPUTE else "elsewhere"):
        return copy(self, *arguments)


def mark_that_is_reached(self: StreamWords) -> Number:
    number = mark(self)
    number.keep()
    return number


def keep_on_copies(self: Number) -> None:
    if self.word.operations.current() == "copies in":
        self.keep()
    else:
        keep_in_stream(self)


def enqueue_kept_promises(self: QueuedTransport, queue: deque[Transfer], transfer: Transfer) -> None:
    if transfer.promise is not None:
        transfer.promise.keep()
    enqueue(self, queue, transfer)


BREAKS = {
    "no marks": mock.patch.object(Late, "mark", lambda self: None),
    "what is received is used before it has come": mock.patch.object(
        QueuedTransport, "receive", receive_that_is_done_at_once
    ),
    "a place is received into while kernels read it": mock.patch.object(
        QueuedTransport, "_enqueue", enqueue_receives_without_mark
    ),
    "a copy to the host waits for no kernel": mock.patch.object(Event, "arrive", arrive_in_compute_only),
    "a kernel waits for no copy from the host": mock.patch.object(Event, "arrive", arrive_in_copies_only),
    "copies in another stream than their marks": mock.patch.object(Launches, "copy", copy_elsewhere),
    "a sum is used before its copies from the host": mock.patch.object(OrderedAllreduce, "arrive", lambda self: None),
    "no stream waits for a word": mock.patch.object(WordOperations, "wait", lambda *_: None),
    "a mark's word is written at once": mock.patch.object(StreamWords, "mark", mark_that_is_reached),
    "a word is written before the copy that it is of": mock.patch.object(Number, "keep_in_stream", keep_on_copies),
    "a promise is kept before its message has come": mock.patch.object(
        QueuedTransport, "_enqueue", enqueue_kept_promises
    ),
}


def breaking(name: str | None) -> contextlib.AbstractContextManager[object]:
    """A context in which the fault is present; None: no fault."""
    return BREAKS[name] if name else contextlib.nullcontext()
