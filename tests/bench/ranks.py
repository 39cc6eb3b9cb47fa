"""How benchmarks start ranks; reading it loads no library."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def mpi(ranks: int) -> list[str]:
    """What launches Python on so many ranks."""
    mpiexec = shlex.split(os.environ.get("MPIEXEC", str(Path(sys.executable).with_name("mpiexec"))))
    return [*mpiexec, "-n", str(ranks), sys.executable]
