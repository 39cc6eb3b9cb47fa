"""What a rank prints and writes for the user: notes, lines, files that options name."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

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
    """Print a line to a standard stream at once."""
    stream.write(f"{line}\n")  # at once, so that ranks do not share a line
    stream.flush()


def write_output(option: str, path: str, data: bytes) -> None:
    """Write the file that an option names; RefusedFile if it cannot be written. "-" is standard output."""
    try:
        with open_output(path) as out:
            out.write(data)
    except OSError as error:
        raise RefusedFile(f"{option} {path}: {error.strerror}") from None
