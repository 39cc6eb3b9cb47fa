"""How benchmarks start ranks; reading it loads no library."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def mpi(ranks: int) -> list[str]:
    """What launches Python on so many ranks."""
    mpiexec = shlex.split(os.environ.get("MPIEXEC", str(Path(sys.executable).with_name("mpiexec"))))
    return [*mpiexec, "-n", str(ranks), sys.executable]


def ended(
    command: list[str], limit: float, folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a launch printed, also one that was ended because it took longer than `limit` seconds (code 124)."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # mpiexec ends its ranks
            out, err = process.communicate()
            code = 124
    return subprocess.CompletedProcess(command, code, out, err)
