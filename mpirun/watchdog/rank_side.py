"""A rank's side of the watchdog: the words that it shows of itself, and the start of its host's watchdog.

The first rank of a host starts the process, and writes it a plan: a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpi4py import MPI

from mpirun.comm.fail_together import Stop
from mpirun.watchdog import DONE, FAILED, IN_SCRIPT, NOTHING, OTHERS, PHASE, ROW, WAIT, WORDS
from schedgen.ir.instructions import Instruction

_BYTES = WORDS * 8
# Without site-packages, the user's folder and the environment's settings: they take longer than all the rest.
_PLACE = str(Path(__file__).parents[2])
_SCRIPT = f"import sys; sys.path.insert(0, {_PLACE!r}); from mpirun.watchdog.process import main; main()"
COMMAND = [sys.executable, "-I", "-S", "-c", _SCRIPT]


class Watchdog:
    """A rank's side of its host's watchdog; `state`: this rank's words, in which code shows what it does."""

    def __init__(self, comm: MPI.Intracomm, first_line: int, instructions: Sequence[Instruction], limit: float) -> None:
        """`first_line`: of the instructions in the file; `limit`: seconds in which some rank has to move. Collective.

        If `limit` is 0, no process is started.
        """
        self.process: subprocess.Popen[bytes] | None = None
        self.state = memoryview(bytearray(_BYTES)).cast("q")
        if limit > 0:
            here = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
            self._start(comm, here, first_line, instructions, limit)
            here.Free()
        self.state[ROW] = self.state[WAIT] = NOTHING

    def _start(
        self, comm: MPI.Intracomm, here: MPI.Comm, first_line: int, instructions: Sequence[Instruction], limit: float
    ) -> None:
        hosts = comm.allreduce(int(here.rank == 0))
        file = _shared_file(here.size) if here.rank == 0 else None
        name = here.bcast(file.name if file is not None else None)
        with Path(name).open("r+b") as shared:
            words = memoryview(mmap.mmap(shared.fileno(), 0)).cast("q")
        self.state = words[here.rank * WORDS : (here.rank + 1) * WORDS]
        rank = (comm.rank, os.getpid(), first_line, list(map(str, instructions)))
        ranks = here.gather(rank)  # all have the file open now
        server = socket.create_server(("", 0), backlog=hosts) if comm.rank == 0 and hosts > 1 else None
        server_at = comm.bcast((socket.gethostname(), server.getsockname()[1], secrets.token_hex()) if server else None)
        if file is None:
            return
        plan = {
            "host": socket.gethostname(),
            "first": comm.rank == 0,
            "timeout": limit,
            "memory": file.fileno(),
            "listen": server.fileno() if server else None,
            **dict(zip(("address", "port", "token"), server_at or ("", 0, ""), strict=True)),
            "ranks": ranks,
        }
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[file.fileno(), *([server.fileno()] if server else [])],
            start_new_session=True,  # signals that end the ranks should not end it: it speaks for them
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(plan).encode() + b"\n")
        self.process.stdin.flush()
        file.close()
        if server is not None:
            server.close()

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Show that the script is in a method of the Engine, which all ranks have to call."""
        self.state[IN_SCRIPT] = False
        try:
            yield
        finally:
            self.state[IN_SCRIPT] = True

    @contextlib.contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Show `phase` during the block and, unless the block has changed the phase, the previous one after it."""
        before, self.state[PHASE] = self.state[PHASE], phase
        yield
        if self.state[PHASE] == phase:
            self.state[PHASE] = before

    def show_wait(self, waits: bool) -> None:
        """Show whether this rank waits for all others."""
        self.state[WAIT] = OTHERS if waits else NOTHING

    def end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Like `__exit__`: show that this rank is done, normally or by a Stop, or that it fails and reports why."""
        if error is not None and not isinstance(error, Stop):
            if isinstance(error, MPI.Exception):  # usually because a rank is gone: the watchdog reports that
                time.sleep(1)
            self.state[PHASE] = FAILED
            return
        self.state[PHASE] = DONE
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)


def _shared_file(ranks: int) -> tempfile._TemporaryFileWrapper[bytes]:
    """A file for the words of `ranks` ranks, in memory (/dev/shm) if the host has such a folder."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    file = tempfile.NamedTemporaryFile(prefix="mpirun-", dir=folder)  # noqa: SIM115
    os.posix_fallocate(file.fileno(), 0, ranks * _BYTES)  # now: later a full folder would cause a SIGBUS
    return file
