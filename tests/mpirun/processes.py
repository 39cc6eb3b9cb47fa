"""How tests launch, and find every process of a launch again."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

MARKER = "MPIRUN_TEST_LAUNCH"  # an environment variable that every process of a launch inherits


def mpiexec() -> list[str]:
    return shlex.split(os.environ.get("MPIEXEC") or shlex.quote(str(Path(sys.executable).with_name("mpiexec"))))


def processes(marker: str) -> dict[int, list[str]]:
    """The processes of one launch that are still there, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
        except OSError:  # gone, or another user's
            continue
    return found
