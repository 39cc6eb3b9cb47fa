"""A standing launch: ranks that stay, and execute one run after the other, as most of a short run is its startup.

mpiexec starts RANKS processes of programs/run_server.py once. `run` writes a request, a line of JSON, to the FIFO of
every rank. All ranks execute it, and rank 0 prints the answer to stdout, as `run: JSON`. `close` closes the FIFOs, and
the ranks exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from processes import environment, kill, mpiexec

HERE = Path(__file__).parent
MAY_FAIL = {"RUNS_MAY_FAIL": "1"}  # an environment: of launches that runs with faults may end


class StandingLaunch:
    """`mpiexec -n RANKS python -m mpi4py programs/run_server.py FIFO`."""

    def __init__(self, ranks: int, env: dict[str, str], folder: Path, cwd: Path = HERE) -> None:
        """Start the ranks, in `cwd`. `folder`: an empty one, for the FIFOs and the ranks' stderr."""
        self.marker, self.runs, self.received = uuid.uuid4().hex, 0, b""
        fifos = [folder / f"requests-{rank}" for rank in range(ranks)]
        for fifo in fifos:
            os.mkfifo(fifo)
        self.fifos = [os.open(fifo, os.O_RDWR) for fifo in fifos]  # O_RDWR does not wait for a reader
        self.err = folder / "err"
        with self.err.open("w") as err:
            self.job = subprocess.Popen(
                [
                    *mpiexec(),
                    "-n",
                    str(ranks),
                    sys.executable,
                    "-m",
                    "mpi4py",
                    str(HERE / "programs" / "run_server.py"),
                    str(folder / "requests"),
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

    def run(self, request: Any, limit: float) -> Any:
        """Return the answer to a request. RuntimeError if the launch ends or takes more than `limit` seconds."""
        self.runs += 1
        for fifo in self.fifos:
            os.write(fifo, json.dumps(request, default=str).encode() + b"\n")
        deadline = time.monotonic() + limit
        while True:
            line, newline, behind = self.received.partition(b"\n")
            if newline:
                self.received = behind
                if line.startswith(b"run: "):
                    return json.loads(line.removeprefix(b"run: "))
                continue
            data = None
            if self.selector.select(deadline - time.monotonic()):
                data = os.read(self.out, 1 << 20)
            if not data:
                how = f"no answer within {limit} s" if data is None else "the launch ended"
                self.close(0)
                raise RuntimeError(f"{how}: {request}\n{self.err.read_text()}")
            self.received += data

    def close(self, grace: float = 30) -> None:
        """Let the ranks exit; kill those that still run after `grace` seconds."""
        for fifo in self.fifos:
            with contextlib.suppress(OSError):
                os.close(fifo)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.job.wait(grace)
        kill(self.marker)
        self.job.kill()
        self.job.wait()
        self.selector.close()
        assert self.job.stdout is not None
        self.job.stdout.close()
