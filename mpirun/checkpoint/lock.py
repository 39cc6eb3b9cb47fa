"""A lock on a folder of checkpoints: one run at a time saves there. It ends with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from pathlib import Path

from mpirun.comm.output import say
from schedgen.util.errors import UsageError

NAME = ".lock"


class FolderLock:
    """A lock that is held from its construction until `release`, or until the process ends. Its file stays."""

    def __init__(self, folder: Path) -> None:
        """UsageError if another run has the lock. If the file system has no locks, a note says so."""
        place = f"{socket.gethostname()}, process {os.getpid()}"
        try:
            self.file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"saving to {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self.file, 200).decode(errors="replace").strip()
            os.close(self.file)
            mine = ", which is this script: close its earlier Engine" if holder == place else ""
            raise UsageError(f"saving to {folder}: another run saves there: on {holder}{mine}") from None
        except OSError:
            say(f"mpirun: note: {folder}: its file system has no locks: let one run save there at a time", sys.stderr)
        with contextlib.suppress(OSError):  # of a full disk: the lock is held, though nobody reads by whom
            os.ftruncate(self.file, 0)
            os.write(self.file, f"{place}\n".encode())

    def release(self) -> None:
        """Let another run save there."""
        os.close(self.file)
