"""What a rank prints and writes for the user: notes, lines, files that options name."""

from __future__ import annotations

import sys
from typing import TextIO

from mpi4py import MPI

from schedgen.util.errors import RefusedFile
from schedgen.util.files import open_output


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
