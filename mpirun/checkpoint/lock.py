"""A lock on a folder of checkpoints: one run at a time saves there. It ends with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
from pathlib import Path

from mpirun.comm.output import say
from schedgen.util.errors import RefusedFile, UsageError

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)


class FolderLock:
    """A lock that is held from its construction until `release`, or until the process ends."""

    def __init__(self, folder: Path, run: str) -> None:
        """`run`: the id of the run that saves. UsageError if another run has the lock.

        If the file system has no locks, a note says so.
        """
        self.path = folder / NAME
        self.place = f" on {socket.gethostname()}, process {os.getpid()}"
        while not self._taken(folder):
            os.close(self.file)  # the holder of this file's lock has removed the file meanwhile
        with contextlib.suppress(OSError):  # of a full disk: the lock is held, though nobody reads by whom
            os.ftruncate(self.file, 0)
            os.write(self.file, f"run {run}{self.place}\n".encode())

    def _taken(self, folder: Path) -> bool:
        """Open and lock the file; returns whether the path still names it."""
        try:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if os.path.lexists(self.path):
                raise RefusedFile(f"{self.path}: {error.strerror}") from None
            raise UsageError(f"saving to {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self.file, 200).decode(errors="replace").strip()
            os.close(self.file)
            who = holder or "its lock file does not name it yet"
            mine = holder.endswith(self.place)
            close = ", which is this script: close its earlier Engine" if mine else ""
            raise UsageError(f"saving to {folder}: another run saves there: {who}{close}") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RefusedFile(f"{self.path}: {error.strerror}") from None
            sentence = "its file system has no locks: let one run save there at a time"
            say(f"mpirun: note: {folder}: {sentence}", sys.stderr)
        return self.is_in(folder)

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has this lock: the one that was locked, or the lock's file, may have been replaced."""
        try:
            return os.path.samestat(os.fstat(self.file), (folder / NAME).stat())
        except OSError:
            return False

    def release(self) -> None:
        """Let another run save there."""
        with contextlib.suppress(OSError):
            if self.is_in(self.path.parent):  # else another run's file may be there
                self.path.unlink()
        os.close(self.file)
