"""A launch that waits for runs: most of a short run is starting Python and importing torch."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from processes import environment, mpiexec, processes

HERE = Path(__file__).parent


class Waiting:
    """`mpiexec -n RANKS python -m mpi4py programs/several.py`, which reads runs from a FIFO until that is closed."""

    def __init__(self, ranks: int, env: dict[str, str], folder: Path, cwd: Path = HERE) -> None:
        self.marker, self.runs, self.rest = uuid.uuid4().hex, 0, b""
        os.mkfifo(folder / "asked")
        self.asked = os.open(folder / "asked", os.O_RDWR)  # does not wait until somebody reads
        with (folder / "err").open("w") as err:
            self.job = subprocess.Popen(
                [
                    *mpiexec(),
                    "-n",
                    str(ranks),
                    sys.executable,
                    "-m",
                    "mpi4py",
                    str(HERE / "programs" / "several.py"),
                    str(folder / "asked"),
                ],
                cwd=cwd,
                env=environment(self.marker, env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
            )
        assert self.job.stdout is not None
        self.out = self.job.stdout.fileno()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.out, selectors.EVENT_READ)

    def run(self, one: Any, limit: float) -> Any:
        """What the program prints of a run; RuntimeError where it does not come to that within `limit` seconds."""
        self.runs += 1
        os.write(self.asked, json.dumps(one, default=str).encode() + b"\n")
        deadline = time.monotonic() + limit
        while True:
            line, newline, rest = self.rest.partition(b"\n")
            if newline:
                self.rest = rest
                if line.startswith(b"run: "):
                    return json.loads(line.removeprefix(b"run: "))
                continue
            piece = None
            if self.selector.select(deadline - time.monotonic()):
                piece = os.read(self.out, 1 << 20)
            if not piece:
                how = f"no answer within {limit} s" if piece is None else "the launch ended"
                self.close(0)
                raise RuntimeError(f"{how}: {one}\n{self.err.read_text()}")
            self.rest += piece

    def close(self, grace: float = 30) -> None:
        """Let the ranks leave; kill those that have not after some seconds."""
        with contextlib.suppress(OSError):
            os.close(self.asked)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.job.wait(grace)
        for pid in processes(self.marker):
            os.kill(pid, signal.SIGKILL)
        self.job.kill()
        self.job.wait()
        self.selector.close()
        assert self.job.stdout is not None
        self.job.stdout.close()
