"""The ranks of a standing launch (standing_launch.py): they execute requested runs one after the other.

Rank r reads requests, lines of JSON, from the FIFO `ARGUMENT-r`, so that a rank that waits uses no CPU time. All ranks
execute a request, and rank 0 prints its result, as `run: JSON`. The ranks exit when the FIFOs are closed.

A request is an object that inspected_run.py takes, or a list: what follows `python -m`, or "-c" and what follows
`python -c`. The result of a list is its exit code, the same on all ranks, and the stdout and the stderr of all ranks.
"""

import contextlib
import io
import json
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import schedgen.util.jit
from mpirun.cli.main import main
from mpirun.comm.waiting import sleeping_barrier

schedgen.util.jit.SMALL = 0  # kernels are compiled: there will be many runs
WORLD = MPI.COMM_WORLD


class CopiedErrors(io.StringIO):
    """Keeps what is written and copies it to stderr, since a run that dies takes this program down with it."""

    def write(self, text: str) -> int:
        """Keep the text, and copy it."""
        sys.__stderr__.write(text)
        return super().write(text)


def run(module: str, arguments: list[str]) -> int:
    """Execute a module as `python -m` does, or a script as `python -c` does; return the exit code."""
    if module == "mpirun":
        return main(arguments)
    try:
        if module == "-c":
            script(*arguments)
        else:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def script(text: str, *arguments: str) -> None:
    """Execute a script as in a new process, with one seed on all ranks. AssertionError if it leaves an Engine open."""

    def of_engines() -> tuple[Any, ...]:
        return signal.getsignal(signal.SIGTERM), sys.excepthook

    before, threads, sys.argv = of_engines(), torch.get_num_threads(), ["-c", *arguments]
    torch.manual_seed(0)
    try:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_num_threads(threads)
        if of_engines() != before:
            raise AssertionError(f"the script leaves {of_engines()} behind, not {before}")


def command(arguments: list[str]) -> list[Any]:
    """Execute a run; on rank 0 return its exit code, and the stdout and the stderr of all ranks. Collective."""
    out, err = io.StringIO(), CopiedErrors()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments[0], arguments[1:])
    sleeping_barrier(WORLD)
    codes = WORLD.allgather(code)
    if len(set(codes)) > 1:
        sys.exit(f"{arguments}: the ranks end with different codes: {codes}")
    outs, errs = (WORLD.gather(stream.getvalue()) for stream in (out, err))
    return [code, "".join(outs or ()), "".join(errs or ())]


sys.path.insert(0, str(Path.cwd()))
with Path(f"{sys.argv[1]}-{WORLD.rank}").open() as requests:
    for line in requests:
        request = json.loads(line)
        if isinstance(request, list):
            result = command(request)
        else:
            import inspected_run

            result = inspected_run.execute(request)
        if WORLD.rank == 0:
            print(f"run: {json.dumps(result)}", flush=True)
