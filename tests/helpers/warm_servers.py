"""Starts the two servers of warm_ranks.py, for even and for odd ranks, and ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = Path(__file__).with_name("warm_ranks.py")


class WarmServers:
    """Two processes that ranks are forked from, by the sockets FOLDER/0 and FOLDER/1."""

    def __init__(
        self,
        folder: Path,
        environments: Sequence[Mapping[str, str]],
        calls: Sequence[str] = (),
        python: Sequence[str] = (),
    ) -> None:
        """Start them, in an environment each. `calls` as in warm_ranks.py; `python`: what does what Python would do."""
        self.sockets = [folder / name for name in ("0", "1")]
        self.processes = [
            subprocess.Popen(
                [*(python or (sys.executable,)), str(PROGRAM), "serve", str(folder), socket.name, *calls],
                stdin=subprocess.PIPE,
                env=environment,
            )
            for socket, environment in zip(self.sockets, environments, strict=True)
        ]

    def wait(self) -> None:
        """Return when both can be asked: who asks before that gets a rank that imports torch itself."""
        while not all(socket.exists() for socket in self.sockets):
            assert all(process.poll() is None for process in self.processes), "a server of warm ranks has ended"
            time.sleep(0.01)

    def close(self) -> None:
        """End them, and the ranks that are left."""
        for process in self.processes:
            process.communicate()
