"""The items of a torch DataLoader, and the generators that they draw from.

Workers end with the iteration, however it ends.
"""

from __future__ import annotations

import ctypes
import random
import signal
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

_PR_SET_PDEATHSIG = 1
States = tuple[Any, Any, Any]  # of the generators of torch (CPU), numpy and Python


def items_of(data: DataLoader[Any]) -> Generator[Any, None, None]:
    """The items of a DataLoader; on exit its workers have ended."""
    with warnings.catch_warnings():
        # Since Python 3.12; workers touch none of what a rank's threads may have locked.
        warnings.filterwarnings("ignore", ".* multi-threaded, use of fork", DeprecationWarning)
        items: Any = iter(data)
    try:
        yield from items
    finally:
        if data.num_workers:
            items._shutdown_workers()


def start_worker(_: int) -> None:
    """Let a worker end with its rank, not by a signal that both get: the rank may have something to save first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(AttributeError):  # only on Linux; elsewhere torch's worker looks for its parent every 5 s
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def seed(*words: int) -> None:
    """Seed the global generators of torch (CPU), numpy and Python."""
    for_torch, for_numpy, for_python = map(int, np.random.SeedSequence(words).generate_state(3))
    torch.default_generator.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)


def states() -> States:
    """The states of these generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_states(before: States) -> None:
    """Give these generators the states that they had before."""
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


@contextmanager
def states_kept() -> Iterator[None]:
    """On exit these generators have the states that they had before."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
