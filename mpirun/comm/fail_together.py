"""Errors that end all ranks together: a mistake that one rank finds becomes the same `Stop` on every rank.

Otherwise the other ranks would wait in MPI for the rank that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from mpi4py import MPI

from mpirun.comm.waiting import sleeping_any
from schedgen.util.errors import RefusedFile, UsageError

T = TypeVar("T")


class Stop(Exception):
    """Every rank ends with this sentence and exit code; one of them, the speaker, prints the sentence."""

    def __init__(self, sentence: str, code: int = 2, speaker: int = 0) -> None:
        """`speaker`: a rank; -1: nobody prints anything."""
        super().__init__(sentence)
        self.code, self.speaker = code, speaker


def together(comm: MPI.Comm, function: Callable[[], T]) -> T:
    """`function()` on every rank. Collective.

    If ranks raise UsageError, RefusedFile or Stop, all raise a Stop with the sentence and code of the lowest of them.
    """
    result, refusal, cause = None, None, None
    try:
        result = function()
    except (UsageError, RefusedFile, Stop) as error:
        refusal, cause = (str(error), error.code), error
    if sleeping_any(comm, refusal is not None):
        speaker, refused = next(one for one in enumerate(comm.allgather(refusal)) if one[1] is not None)
        raise Stop(refused[0], refused[1], speaker) from cause
    return result  # type: ignore[return-value]


def refuse(comm: MPI.Comm, wrong: bool, sentence: str) -> None:
    """Raise a Stop on all ranks if `wrong` is true on any of them. Collective."""

    def look() -> None:
        if wrong:
            raise UsageError(sentence)

    together(comm, look)


def on_rank_0(comm: MPI.Comm, function: Callable[[], T]) -> T | None:
    """`function()` on rank 0, None elsewhere; its UsageError or RefusedFile is a Stop on all ranks."""
    return together(comm, lambda: function() if comm.rank == 0 else None)


def from_rank_0(comm: MPI.Comm, function: Callable[[], T]) -> T:
    """`function()` of rank 0, on every rank; its UsageError or RefusedFile is a Stop on all ranks."""
    return comm.bcast(on_rank_0(comm, function))


def first_difference(comm: MPI.Comm, own: Mapping[T, str]) -> tuple[T, int, int, str, str] | None:
    """A key for which two ranks have different texts, these ranks, and the texts; None: there is none. Collective.

    `own`: texts, such as hashes, by key. A key that only one rank has makes no difference.
    """
    first: dict[T, tuple[int, str]] = {}  # by key: the first rank that has it, and its text
    for rank, of_rank in enumerate(comm.allgather(own)):
        for key, value in of_rank.items():
            before, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return key, before, rank, expected, value
    return None
