"""Items prefetched by processes or by a thread, and the random numbers that they draw.

In: a torch DataLoader. Out: its items, in order. Threads and processes end with the iteration, however it ends.
"""

from __future__ import annotations

import ctypes
import random
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

_PR_SET_PDEATHSIG = 1
_LEAVING = signal.SIGINT, signal.SIGTERM
_reading = [threading.RLock()]


def made_ahead(data: DataLoader[Any], ahead: int, may_be: Callable[[bool], bool]) -> Generator[Any, None, None]:
    """The items of a DataLoader; a thread prefetches `ahead` of them: it makes them, or takes them from workers.

    The calling thread gets the first item. Then `may_be` is told whether this item drew random numbers from the global
    generators of this process, and returns whether a thread may make the others; if not, the calling thread does.
    """
    end = object()
    with ExitStack() as stack:
        with warnings.catch_warnings(), _signals_wait():
            # Since Python 3.12; workers touch none of what a rank's threads may have locked.
            warnings.filterwarnings("ignore", ".* multi-threaded, use of fork", DeprecationWarning)
            items: Any = iter(data)
        if data.num_workers:
            stack.callback(items._shutdown_workers)
        with seeded(0) as drew:
            first = next(items, end)
            in_thread = may_be(drew())
        if first is end:
            return
        if not in_thread:
            yield first
            yield from items
            return
        mode = (torch.is_grad_enabled(),)  # each thread has its own
        thread = ThreadPoolExecutor(1, "mpirun-loader", torch.set_grad_enabled, mode)
        stack.callback(thread.shutdown, cancel_futures=True)
        made = deque(thread.submit(next, items, end) for _ in range(ahead))
        yield first
        while (item := made.popleft().result()) is not end:
            made.append(thread.submit(next, items, end))
            yield item


@contextmanager
def reading() -> Iterator[None]:
    """Inside, no other thread of this process reads a dataset: two loaders may share one, or parts of one."""
    with _reading[0]:
        yield


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait; they would end a worker that starts and does not ignore them yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(_: int) -> None:
    """Let a worker end with its rank, not by a signal that both get: the rank may have something to save first."""
    _reading[0] = threading.RLock()  # the rank's lock may have been held when this process was forked
    for number in _LEAVING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEAVING)
    with suppress(AttributeError):  # only on Linux; elsewhere torch's worker looks for its parent every 5 s
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def seeded(*words: int) -> Iterator[Callable[[], bool]]:
    """Inside, the global generators of torch (CPU), numpy and Python are seeded by `words`; on exit they are restored.

    Yields a function that says whether they were drawn from.
    """
    outside = _states()
    for_torch, for_numpy, for_python = map(int, np.random.SeedSequence(words).generate_state(3))
    torch.default_generator.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)
    begin = _states()
    try:
        yield lambda: not _same(begin, _states())
    finally:
        torch.set_rng_state(outside[0])
        np.random.set_state(outside[1])
        random.setstate(outside[2])


@contextmanager
def watched(look: bool) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether random numbers were drawn inside: by this thread from torch's generator, if
    `look` (at every operation), or by any thread from those of numpy and Python.
    """
    begin, draws = _states(), DrawWatch()
    with draws if look else nullcontext():
        yield lambda: draws.drew or not _same((begin[0], *_states()[1:]), begin)


class DrawWatch(TorchDispatchMode):
    """Sees in `drew` whether this thread draws from torch's global generator."""

    def __init__(self) -> None:
        """Nothing has been drawn yet."""
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            values = arguments_of(func, args, kwargs)
            self.drew |= draws(func, values) and not any(isinstance(x, torch.Generator) for x in values.values())
        return func(*args, **kwargs)


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name, also those that have their defaults."""
    parameters = func._schema.arguments
    values = {parameter.name: parameter.default_value for parameter in parameters}
    return values | {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | dict(kwargs)


def draws(func: Any, values: Mapping[str, Any]) -> bool:
    """Whether an operation with these arguments draws; attention is tagged so, but draws only with dropout."""
    return torch.Tag.nondeterministic_seeded in func.tags and values.get("dropout_p", 1.0) != 0.0


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    return (
        torch.equal(one[0], other[0])
        and np.array_equal(one[1][1], other[1][1])
        and one[1][2:] == other[1][2:]
        and one[2] == other[2]
    )
