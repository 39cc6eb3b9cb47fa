"""What a rank prints and writes for the user: notes, lines that a full disk does not stop, files that options name."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO
from weakref import WeakSet

from mpi4py import MPI

from schedgen.util.errors import MpirunWarning, RefusedFile
from schedgen.util.files import open_output


@contextlib.contextmanager
def print_notes(comm: MPI.Comm) -> Iterator[None]:
    """Rank 0 prints each MpirunWarning of the block as a line; other warnings are issued as usual."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if not issubclass(warning.category, MpirunWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        else:
            note(comm, warning.message)


def note(comm: MPI.Comm, sentence: object) -> None:
    """Rank 0 prints a line for the user."""
    if comm.rank == 0:
        say(f"mpirun: note: {sentence}", sys.stderr)


def say(line: str, stream: TextIO) -> None:
    """Print a line to a standard stream. If that fails, as on a full disk, a note says so, and the run continues."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except OSError as error:
        _incomplete.add(stream)
        _write_nowhere(stream)
        which = "error" if stream is sys.stderr else "output"
        say(f"mpirun: note: standard {which}: {error.strerror}: no more is printed", sys.stderr)


_incomplete = WeakSet[TextIO]()  # streams to which `say` could not print


def all_said() -> bool:
    """Whether `say` could print all lines to this process's standard streams."""
    return sys.stdout not in _incomplete and sys.stderr not in _incomplete


def _write_nowhere(stream: TextIO) -> None:
    """Redirect a standard stream to /dev/null: else Python tries at exit to write what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_output(option: str, path: str, data: bytes) -> None:
    """Write the file that an option names; RefusedFile if it cannot be written. "-" is standard output."""
    try:
        with open_output(path) as out:
            out.write(data)
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _write_nowhere(sys.stdout)
        raise RefusedFile(f"{option} {path}: {error.strerror}") from None
