"""The launcher that tests use, and a marker by which they find all processes of a launch."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKER = "MPIRUN_TEST_LAUNCH"  # an environment variable that every process of a launch inherits


def mpiexec() -> list[str]:
    """The launcher and its options."""
    return shlex.split(os.environ.get("MPIEXEC") or shlex.quote(str(Path(sys.executable).with_name("mpiexec"))))


def environment(marker: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a launch that `processes(marker)` finds."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **(more or {}), MARKER: marker}


def processes(marker: str) -> dict[int, list[str]]:
    """The processes of one launch that still run, with their command lines, by pid.

    /proc shows a forked rank with its server's environment, so a marker in the name of its stdout's file counts, too.
    """
    command_lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            inherited = f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes()
            if inherited or marker in str((folder / "fd" / "1").readlink()):
                command_lines[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
        except OSError:  # gone, or another user's
            continue
    return command_lines


def kill(marker: str) -> None:
    """Kill the processes of one launch; its warm ranks first print on stderr where they are."""
    ranks = [pid for pid, words in processes(marker).items() if words[4:5] == ["rank"]]
    _send(signal.SIGQUIT, ranks)
    time.sleep(1 if ranks else 0)
    _send(signal.SIGKILL, processes(marker))


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
