"""`mpiexec -n W python -m mpirun FILE --model MODULE:FUNCTION`, and `... mpirun profile` or `graph`.

Exit codes: 0 done; 1 a refused file, a failed verification, or a rank that
failed; 2 wrong usage; 143 left when asked to by SIGTERM. A mistake of the user's ends all ranks with one
sentence; a rank that fails on its own says where and takes all others along.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mpi4py import MPI

from mpirun.cli.options import graph_options, profile_options, train_options
from mpirun.comm.fail_together import Stop, notes, on_rank_0
from schedgen.util.errors import raised

if TYPE_CHECKING:
    from mpirun.cli.profile import Profile
    from mpirun.cli.run import Run

T = TypeVar("T", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    comm = MPI.COMM_WORLD
    run: Run | Profile | None = None
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # torch is slow to import: --help should not wait for it
        if arguments[:1] == ["profile"]:
            options = profile_options(comm, arguments[1:])
            with _for_good():
                from mpirun.cli.profile import Profile

            sys.path.insert(0, str(Path.cwd()))
            run = profile = Profile(comm, options)
            return profile.write()
        if arguments[:1] == ["graph"]:
            options = graph_options(comm, arguments[1:])
            with _for_good():
                from mpirun.cli import graph

            sys.path.insert(0, str(Path.cwd()))
            with notes(comm):
                return on_rank_0(comm, lambda: graph.write(options)) or 0
        options = train_options(comm, arguments)
        with _for_good():
            from mpirun.cli.run import Run

        sys.path.insert(0, str(Path.cwd()))
        run = training = Run(comm, options)
        return training.train()
    except Stop as stop:
        if comm.rank == stop.speaker:
            print(f"mpirun: {stop}", file=sys.stderr, flush=True)
        return stop.code
    except KeyboardInterrupt:  # of all ranks, most often
        if comm.rank == 0:
            print("mpirun: interrupted", file=sys.stderr, flush=True)
        comm.Abort(130)
    except BaseException as error:
        _die(comm, run, error)


@contextlib.contextmanager
def _for_good() -> Iterator[None]:
    """What is imported is never garbage: it is not searched for any, now or in a training step."""
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def _die(comm: MPI.Intracomm, run: Run | Profile | None, error: BaseException) -> NoReturn:
    """One message, then all ranks end: without Abort the others would wait for this one for ever."""
    try:
        if run is not None and run.options.traceback:
            traceback.print_exception(error)
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        source = f" (at {frame[0].filename}:{frame[0].lineno})" if frame else ""
        place = f"rank {comm.rank} on {socket.gethostname()}: {run.place() if run is not None else ''}"
        print(f"mpirun: {place}{raised(error)}{source}", file=sys.stderr, flush=True)
        time.sleep(0.3)  # Abort makes launchers drop what they have not passed on yet
    finally:
        comm.Abort(1)
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
