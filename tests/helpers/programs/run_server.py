"""Runs of mpirun in one launch, as they are requested. The argument is a FIFO with a request a line, in JSON.

A request is an object that inspected_run.py takes, or a list: what follows `python -m`, or "-c" and what follows
`python -c`. Of such a run rank 0 prints the exit code, the same on all ranks, the stdout, and the stderr of all ranks.
"""

import contextlib
import io
import json
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import schedgen.util.jit
from mpirun.cli.main import main
from mpirun.comm.waiting import sleeping_barrier

schedgen.util.jit.SMALL = 0  # kernels are compiled: there will be many runs
WORLD = MPI.COMM_WORLD
LONGEST = 1 << 16  # bytes of a request


class CopiedErrors(io.StringIO):
    """Keeps what is written, and passes it on: a run that dies takes this program along."""

    def write(self, text: str) -> int:
        """As to any file."""
        sys.__stderr__.write(text)
        return super().write(text)


def requests(file: str) -> Iterator[Any]:
    """The requests, which rank 0 reads. The others sleep until then."""
    line = bytearray(LONGEST)
    with Path(file).open("rb") if WORLD.rank == 0 else contextlib.nullcontext() as lines:
        while True:
            if lines is not None:
                read = lines.readline()
                assert len(read) <= LONGEST
                line[:] = read.ljust(LONGEST)
            sent = WORLD.Ibcast(line)
            while not sent.Test():
                time.sleep(0.01)
            if not (request := line.strip()):
                return
            yield json.loads(request)


def run(module: str, arguments: list[str]) -> int:
    """Do what `python -m` does, or a script that `python -c` is given; the exit code."""
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
    """Execute it as in a new process, where all ranks draw the same numbers. It closes its Engines, which give back."""

    def of_engines() -> tuple[Any, ...]:
        return signal.getsignal(signal.SIGTERM), sys.excepthook, torch.get_num_threads()

    before, sys.argv = of_engines(), ["-c", *arguments]
    torch.manual_seed(0)
    try:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        if of_engines() != before:
            raise AssertionError(f"the script leaves {of_engines()} behind, not {before}")


def command(arguments: list[str]) -> list[Any]:
    """A run: its exit code, its stdout, its stderr. Collective."""
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
for request in requests(sys.argv[1]):
    if isinstance(request, list):
        result = command(request)
    else:
        import inspected_run

        result = inspected_run.execute(request)
    if WORLD.rank == 0:
        print(f"run: {json.dumps(result)}", flush=True)
