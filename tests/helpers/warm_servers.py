"""Starts and ends the two servers of warm_ranks.py, from which tests fork ranks that need not import torch.

A server imports torch on the first request and forks a child for each. It listens on a Unix socket in FOLDER, `0` for
even ranks and `1` for odd ones, and ends, with the children that still run, once its stdin is closed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

PROGRAM = Path(__file__).with_name("warm_ranks.py")


class WarmServers:
    """The two servers, which listen on FOLDER/0 and FOLDER/1."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Start the servers."""
        self.sockets = [folder / name for name in ("0", "1")]
        serve = [sys.executable, str(PROGRAM), "serve", str(folder)]
        self.processes = [
            subprocess.Popen([*serve, socket.name], stdin=subprocess.PIPE, env=environment) for socket in self.sockets
        ]

    def wait(self) -> None:
        """Block until both servers accept connections: a process that connects earlier is started cold."""
        while not all(socket.exists() for socket in self.sockets):
            assert all(process.poll() is None for process in self.processes), "a server of warm ranks has ended"
            time.sleep(0.01)

    def close(self) -> None:
        """End the servers, and the ranks that still run."""
        for process in self.processes:
            process.communicate()
