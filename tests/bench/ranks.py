"""How benchmarks start ranks and call schedgen; importing it loads no library."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path


def mpi(ranks: int) -> list[str]:
    """The command that launches Python on so many ranks."""
    mpiexec = shlex.split(os.environ.get("MPIEXEC", str(Path(sys.executable).with_name("mpiexec"))))
    return [*mpiexec, "-n", str(ranks), sys.executable]


def schedgen(*words: object) -> str:
    """Run `schedgen WORDS` in this process and return its stdout. CalledProcessError if its exit code is not 0."""
    from schedgen.cli.main import main

    arguments, out = [*map(str, words), "--quiet"], io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    if code:
        raise subprocess.CalledProcessError(code, ["schedgen", *arguments])
    return out.getvalue()


def ended(
    command: list[str], limit: float, folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a launch and return its output. After `limit` seconds it is ended, with code 124."""
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
