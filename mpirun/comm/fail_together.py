"""Errors that all ranks end with together, and what one rank alone dies of."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from schedgen.util.errors import RefusedFile, UsageError

T = TypeVar("T")


class Stop(Exception):
    """Every rank ends with this sentence; one of them prints it."""

    def __init__(self, sentence: str, code: int, speaker: int) -> None:
        super().__init__(sentence)
        self.code, self.speaker = code, speaker


def together(comm: MPI.Comm, function: Callable[[], T]) -> T:
    """`function()` on every rank; where it refuses on one, all raise the lowest rank's Stop."""
    result, refusal = None, None
    try:
        result = function()
    except (UsageError, RefusedFile) as error:
        refusal = (str(error), error.code)
    meet(comm)
    refusals = comm.allgather(refusal)
    for rank, one in enumerate(refusals):
        if one is not None:
            raise Stop(one[0], one[1], speaker=rank)
    return result  # type: ignore[return-value]


def meet(comm: MPI.Comm) -> None:
    """A barrier in which those who wait leave the cores to those who are still to come."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def on_rank_0(comm: MPI.Comm, function: Callable[[], T]) -> T | None:
    """`function()` on rank 0, None elsewhere; where it refuses, all raise its Stop."""
    return together(comm, lambda: function() if comm.rank == 0 else None)


def from_rank_0(comm: MPI.Comm, function: Callable[[], T]) -> T:
    """`function()` of rank 0, on every rank; where it refuses, all raise its Stop."""
    return comm.bcast(on_rank_0(comm, function))


def bytes_from_rank_0(comm: MPI.Comm, function: Callable[[], bytes]) -> NDArray[np.uint8]:
    """As `from_rank_0`, for bytes of any length, shape (length,): they are not pickled."""
    data = on_rank_0(comm, function)
    size = comm.bcast(None if data is None else len(data))
    received = np.empty(size, np.uint8) if data is None else np.frombuffer(data, np.uint8).copy()
    for start in range(0, size, 2**30):  # counts that every MPI takes
        comm.Bcast([received[start : start + 2**30], MPI.BYTE])
    return received


@contextlib.contextmanager
def notes(comm: MPI.Comm) -> Iterator[None]:
    """Rank 0 says what `mpirun.frontend` warns of, in a line each; other warnings stay what they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for one in caught:
        if one.category.__name__ != "MpirunWarning":
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif comm.rank == 0:
            print(f"mpirun: note: {one.message}", file=sys.stderr, flush=True)


def writable(option: str, path: str) -> None:
    """UsageError now, where a file could not be written in the end."""
    folder = Path(path).resolve().parent
    wrong = "Is a directory" if Path(path).is_dir() else None if folder.is_dir() else "No such file or directory"
    if wrong is None and path != "-" and not os.access(folder, os.W_OK):
        wrong = "Permission denied"
    if wrong:
        raise UsageError(f"{option} {path}: {wrong}")
