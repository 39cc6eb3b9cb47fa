"""Streams of kernels that run as late as they may: none before somebody asks for an event or waits for the device.

As on a GPU, kernels of one stream run in their order, those of two streams in any order unless one waits for an event
of the other. Which stream goes on when somebody asks, and how far, is drawn at random.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

Kernel = Callable[[], object]
DEFAULT, COMPUTE = "default", "compute"  # the stream that a thread begins with; that which the main thread computes in


class Event:
    """A point in a stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.come = streams, False

    def reached(self) -> bool:
        """Whether all before it has run; because somebody has asked, something may run."""
        if not self.come:
            self.streams.turn()
        return self.come

    def set(self) -> None:
        self.come = True

    def arrive(self) -> None:
        """What is launched into the current stream from now on runs after it; the host does not wait."""
        self.streams.queues[self.streams.current].append(self)


class Streams:
    """The streams of one device, by name; each thread launches into one of them."""

    def __init__(self, seed: int, in_kernels: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """`seed`: of when kernels run; `in_kernels`: what they run in."""
        self.in_kernels = in_kernels
        self.queues: dict[str, deque[Kernel | Event]] = {DEFAULT: deque(), COMPUTE: deque()}
        self.rng = np.random.default_rng(seed)
        self.patience = 0  # how often somebody will ask in vain
        self.thread = threading.local()
        self.thread.current = COMPUTE
        self.running = threading.RLock()
        self.ran = self.longest = 0  # kernels that have run; the most that were waiting at once
        self.strict = ""  # why the host must not wait for the device

    @property
    def current(self) -> str:
        return getattr(self.thread, "current", DEFAULT)

    @contextlib.contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """In it, this thread launches into that stream."""
        before, self.thread.current = self.current, stream
        self.queues.setdefault(stream, deque())
        yield
        self.thread.current = before

    def launch(self, kernel: Kernel) -> None:
        """Behind all that was launched into the current stream."""
        queue = self.queues[self.current]
        queue.append(kernel)
        self.longest = max(self.longest, len(queue))

    def record(self) -> Event:
        """An event behind all that was launched into the current stream."""
        event = Event(self)
        self.launch(event.set)
        return event

    def turn(self) -> None:
        """Somebody has asked: after some times in vain, a stream goes on by some kernels."""
        with self.running:
            self.patience -= 1
            if self.patience < 0 and (ready := self._ready()):
                queue = ready[self.rng.integers(len(ready))]
                with self.in_kernels():
                    for _ in range(int(self.rng.integers(1, 20))):
                        self._run(queue)
                self.patience = int(self.rng.integers(0, 3))

    def synchronize(self) -> None:
        """Run all that is launched."""
        with self.running, self.in_kernels():
            while ready := self._ready():
                self._run(ready[0])

    def host_waits(self, what: str) -> None:
        """The host needs what the device computes. RuntimeError where it must not wait."""
        if self.strict:
            raise RuntimeError(f"{what} makes the host wait for the device, in {self.strict}")
        self.synchronize()

    def _ready(self) -> list[deque[Kernel | Event]]:
        """The streams that can go on."""
        queues = list(self.queues.values())
        return [queue for queue in queues if queue and (not isinstance(head := queue[0], Event) or head.come)]

    def _run(self, queue: deque[Kernel | Event]) -> None:
        """What comes next in a stream, if it may."""
        if not queue:
            return
        if isinstance(head := queue[0], Event):
            if head.come:
                queue.popleft()
            return
        queue.popleft()
        self.ran += 1
        head()
