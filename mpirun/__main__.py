"""`mpiexec -n W python -m mpirun FILE --model MODULE:FUNCTION`: options, and how a run ends.

Exit codes: 0 done; 1 a refused file, a failed verification, or a rank that
failed; 2 wrong usage. A mistake of the user's ends all ranks with one
sentence; a rank that fails on its own says where and takes all others along.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mpi4py import MPI

from mpirun.errors import Stop
from schedgen.errors import one_line

if TYPE_CHECKING:
    from mpirun.train import Run

T = TypeVar("T", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    comm = MPI.COMM_WORLD
    run = None
    try:
        options = _options(comm, arguments)
        from mpirun.train import Run  # torch is slow to import: --help should not wait for it

        sys.path.insert(0, str(Path.cwd()))
        run = Run(comm, options)
        return run.train()
    except Stop as stop:
        if comm.rank == stop.speaker:
            print(f"mpirun: {stop}", file=sys.stderr, flush=True)
        return stop.code
    except BaseException as error:
        _die(comm, run, error)


def _die(comm: MPI.Intracomm, run: Run | None, error: BaseException) -> NoReturn:
    """One message, then all ranks end: without Abort the others would wait for this one for ever."""
    try:
        if run is not None and run.options.traceback:
            traceback.print_exception(error)
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        source = f" (at {frame[0].filename}:{frame[0].lineno})" if frame else ""
        place = f"rank {comm.rank} on {socket.gethostname()}: {run.place() if run is not None else ''}"
        print(f"mpirun: {place}{type(error).__name__}: {one_line(error)}{source}", file=sys.stderr, flush=True)
        time.sleep(0.3)  # Abort makes launchers drop what they have not passed on yet
    finally:
        comm.Abort(1)
    raise SystemExit(1)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Stop(f"{message} (see python -m mpirun --help)", 2, speaker=0)


def _options(comm: MPI.Comm, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m mpirun",
        description="Train a model by a schedule, one MPI rank a worker.",
        epilog="example: mpiexec -n 4 python -m mpirun 1f1b.json --model mpirun.models.gpt:tiny --steps 20",
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this and exit")
    add("file", metavar="FILE", nargs="?", help="a schedule, written by schedgen compile")
    add("--model", metavar="MODULE:FUNCTION", help="a function: number of stages -> mpirun.Model")
    add("--steps", type=_count, default=20, metavar="N", help="default: 20")
    add("--text", metavar="FILE", help="the training text; default: the sources of Python's standard library")
    add(
        "--seed", type=_count, default=0, metavar="N", help="of the weights and of the microbatches' places in the text"
    )
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default: adamw")
    add("--lr", type=_positive, default=1e-3, metavar="X", help="learning rate; default: 0.001")
    add("--momentum", type=_fraction, default=0.0, metavar="X", help="of sgd; default: 0")
    add("--weight-decay", type=_fraction, default=0.01, metavar="X", help="default: 0.01")
    add("--lr-schedule", choices=("constant", "linear", "cosine"), default="constant", help="default: constant")
    add("--warmup", type=_count, default=0, metavar="N", help="steps in which the learning rate rises; default: 0")
    add("--accumulate", type=_positive_count, default=1, metavar="N", help="walks through the schedule before a step")
    add(
        "--autocast", choices=("bf16",), help="compute in mixed precision; weights and their gradients stay as they are"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where every rank has one")
    add("--clip", type=_positive, metavar="X", help="largest norm of the whole gradient; default: no limit")
    add("--verify", action="store_true", help="do the same steps in one process and compare; exit 1 if they differ")
    add(
        "--tolerance",
        type=_fraction,
        metavar="X",
        help="relative difference that --verify allows; default: 1e-5, with --autocast 1e-2",
    )
    add("--canonical", action="store_true", help="add gradients in microbatch order: the bits of one process")
    add("--metrics", metavar="FILE", help="one JSON object a step: step, loss, grad_norm, seconds, tokens")
    add("--trace", metavar="FILE", help="when ranks did what, for Perfetto and schedgen stats --measured")
    add("--trace-steps", type=_positive_count, default=1, metavar="K", help="trace the last K steps; default: 1")
    add("--threads", type=_threads, default=0, metavar="N", help="of torch on each rank; default: cores / ranks")
    add("--traceback", action="store_true", help="where a rank fails, show the whole traceback")
    options = parser.parse_args(arguments)
    if options.help:
        if comm.rank == 0:
            parser.print_help()
        raise Stop("", 0, speaker=-1)
    if options.momentum and options.optimizer != "sgd":
        parser.error("--momentum is of --optimizer sgd")
    if options.trace and not options.steps:
        parser.error("--trace: there is nothing to trace in 0 steps")
    if options.tolerance is None:
        options.tolerance = 1e-2 if options.autocast else 1e-5
    for name in ("file", "model"):
        if getattr(options, name) is None:
            parser.error(f"{'FILE' if name == 'file' else '--model'} is missing")
    return options


def _number(name: str, kind: type[T], lowest: float, highest: float) -> Callable[[str], T]:
    """What argparse reads a number with; `name` says which numbers it takes."""

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value < highest:
            raise argparse.ArgumentTypeError(f"'{text}' is no {name}")
        return value

    return read


_count = _number("whole number of at least 0", int, 0, 2**31)
_positive_count = _number("whole number of at least 1", int, 1, 2**31)
_threads = _number("number from 1 to 1024", int, 1, 1025)
_positive = _number("positive number", float, 1e-300, float("inf"))
_fraction = _number("number of at least 0", float, 0, float("inf"))

if __name__ == "__main__":
    sys.exit(main())
