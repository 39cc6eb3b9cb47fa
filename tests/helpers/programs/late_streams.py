"""Streams whose kernels run as late as they may: none before the host polls an event or waits for the device.

As on a GPU, kernels of one stream run in their order, those of two streams in any order unless one waits for an event
of the other. Which stream advances on a poll, and how far, is random.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

Kernel = Callable[[], object]
NAP = 5e-4  # seconds
DEFAULT, COMPUTE = "default", "compute"  # the stream that a thread begins with; that which the main thread computes in


class Event:
    """A point in a stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.come = streams, False

    def reached(self) -> bool:
        """Whether all before it has run. This poll may run some kernels."""
        if not self.come:
            self.streams.turn()
        return self.come

    def set(self) -> None:
        self.come = True

    def arrive(self) -> None:
        """Make all that is launched into the current stream from now on run after it; the host does not wait."""
        self.streams.queues[self.streams.current].append(self)


class WordWait(Event):
    """A stream's wait until a word of the host's memory is a number or above."""

    def __init__(self, streams: Streams, address: int, number: int) -> None:
        super().__init__(streams)
        self.word, self.number = ctypes.c_uint32.from_address(address), number

    @property
    def come(self) -> bool:  # type: ignore[override]
        return (self.word.value - self.number) % 2**32 < 2**31

    @come.setter
    def come(self, _: bool) -> None:
        pass


class WordOperations:
    """As `stream_words.CudaStreamOperations`."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def current(self) -> str:
        return self.streams.current

    def write(self, address: int, number: int) -> None:
        self.streams.refuse_in_capture("a word")
        self.streams.launch(lambda: setattr(ctypes.c_uint32.from_address(address), "value", number))

    def wait(self, address: int, number: int) -> None:
        self.streams.refuse_in_capture("a word")
        WordWait(self.streams, address, number).arrive()


class Streams:
    """The streams of one device, by name; each thread launches into one of them."""

    def __init__(self, seed: int, in_kernels: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """`seed`: of when kernels run; `in_kernels`: the context that they run in."""
        self.in_kernels = in_kernels
        self.queues: dict[str, deque[Kernel | Event]] = {DEFAULT: deque(), COMPUTE: deque()}
        self.rng = np.random.default_rng(seed)
        self.patience = 0  # how many polls will run nothing
        self.thread = threading.local()
        self.thread.current = COMPUTE
        self.running = threading.RLock()
        self.ran = self.longest = 0  # kernels that have run; the most that were waiting at once
        self.strict = ""  # why the host must not wait for the device
        self.captured: dict[str, list[Kernel]] = {}  # by stream that is captured: its kernels so far

    @property
    def current(self) -> str:
        return getattr(self.thread, "current", DEFAULT)

    @contextlib.contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """A context in which this thread launches into that stream."""
        before, self.thread.current = self.current, stream
        self.queues.setdefault(stream, deque())
        yield
        self.thread.current = before

    def launch(self, kernel: Kernel) -> None:
        """Put a kernel at the end of the current stream, or of its capture."""
        if self.captures:
            self.captured[self.current].append(kernel)
            return
        queue = self.queues[self.current]
        queue.append(kernel)
        self.longest = max(self.longest, len(queue))

    @property
    def captures(self) -> bool:
        """Whether the current stream is captured."""
        return self.current in self.captured

    @contextlib.contextmanager
    def capturing(self, kernels: list[Kernel]) -> Iterator[None]:
        """A context in which kernels launched into the current stream are appended to `kernels` instead."""
        stream = self.current
        self.captured[stream] = kernels
        try:
            yield
        finally:
            del self.captured[stream]

    def refuse_in_capture(self, what: str) -> None:
        """RuntimeError if the current stream is captured."""
        if self.captures:
            raise RuntimeError(f"{what} is not permitted while the stream is captured")

    def record(self) -> Event:
        """An event after all that was launched into the current stream."""
        self.refuse_in_capture("an event")
        event = Event(self)
        self.launch(event.set)
        return event

    def turn(self) -> None:
        """A poll: after some that run nothing, run some kernels of a random stream."""
        with self.running:
            self.patience -= 1
            if self.patience < 0 and (ready := self._ready()):
                queue = ready[self.rng.integers(len(ready))]
                with self.in_kernels():
                    for _ in range(int(self.rng.integers(1, 20))):
                        self._run(queue)
                self.patience = int(self.rng.integers(0, 3))

    def synchronize(self) -> None:
        """Run all that is launched, waiting for words that streams wait for."""
        deadline = time.monotonic() + 60
        while not self._all_run():
            if time.monotonic() > deadline:
                raise RuntimeError("a stream waits for a word that nobody writes")
            time.sleep(NAP)

    def _all_run(self) -> bool:
        """Run all kernels that may run; return whether none is left."""
        with self.running, self.in_kernels():  # locked: no other thread is inside a kernel
            while ready := self._ready():
                self._run(ready[0])
            return not any(list(self.queues.values()))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """A context in which kernels run now and then, though nothing polls an event."""
        ended = threading.Event()

        def run() -> None:
            try:
                while not ended.wait(NAP):
                    self.turn()
            except BaseException:  # else the host would wait for ever for a word of the stream
                traceback.print_exc()
                os._exit(1)

        thread = threading.Thread(target=run, name="late-streams", daemon=True)
        thread.start()
        yield
        ended.set()
        thread.join()

    def host_waits(self, what: str) -> None:
        """The host needs what the device computes. RuntimeError where it must not wait."""
        self.refuse_in_capture(what)
        if self.strict:
            raise RuntimeError(f"{what} makes the host wait for the device, in {self.strict}")
        self.synchronize()

    def _ready(self) -> list[deque[Kernel | Event]]:
        """The queues of the streams whose next kernel may run, or whose event has come."""
        queues = list(self.queues.values())
        return [queue for queue in queues if queue and (not isinstance(head := queue[0], Event) or head.come)]

    def _run(self, queue: deque[Kernel | Event]) -> None:
        """Run the next kernel of a stream, or pass the next event if it has come."""
        if not queue:
            return
        if isinstance(head := queue[0], Event):
            if head.come:
                queue.popleft()
            return
        queue.popleft()
        self.ran += 1
        head()
