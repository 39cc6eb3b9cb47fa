"""`python -m mpirun`: chooses the command, and handles what goes wrong on this rank or on all of them.

Exit codes: 0 done; 1 a refused file, a failed verification, or a rank that failed; 2 wrong usage; 143 left when asked
to by SIGTERM. A user's mistake ends all ranks with one sentence, which one of them prints. A rank that fails on its own
says where, and ends all others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpirun.cli.options import COMMANDS, read_options
from mpirun.comm.fail_together import Stop
from mpirun.training.errors import end_all_ranks
from schedgen.util.files import prepare_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute a command; returns the exit code. `arguments`: by default those of the process. Collective."""
    prepare_streams()
    comm, command = MPI.COMM_WORLD, None
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command = _command(comm, arguments)
        return command.execute() or 0
    except Stop as stop:
        if comm.rank == stop.speaker:
            print(f"mpirun: {stop}", file=sys.stderr, flush=True)
        return stop.code
    except SystemExit as end:  # an Engine has said why
        return end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        position = getattr(command, "position", str)()  # of a command that executes instructions
        end_all_ranks(comm, position, error, "--traceback" in arguments)


def _command(comm: MPI.Intracomm, arguments: Sequence[str]) -> Any:
    """The requested command. torch is imported only once the options are right: --help does not wait for it."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    options = read_options(comm, name, arguments[1:] if name else arguments)
    with _imports():
        module = importlib.import_module(f"mpirun.cli.{'files' if name else 'run'}")
    return getattr(module, name.capitalize() or "Run")(comm, options)


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Let garbage collection skip what is imported inside, now and in steps: it lives until the process ends.

    Afterwards modules in the working directory can be imported, as --model does.
    """
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()
    sys.path.insert(0, str(Path.cwd()))
