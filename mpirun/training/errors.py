"""How a script or a command ends: with one sentence, on all ranks, when something goes wrong.

A `Stop` is raised on all ranks: one of them prints the sentence, and all exit with its code. Any other error is one
rank's alone: the rank says where it is and ends the others, because they would wait for it for ever. SIGTERM, which
Slurm sends before the time is up, lets the run that steps next leave after its step. The signal is kept until a run has
left, so that it also counts for one that begins later.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import ClassVar, NoReturn

from mpi4py import MPI

from mpirun.comm.fail_together import Stop
from schedgen.util.errors import RefusedFile, UsageError, raised, raised_at

PASSED_ON = 0.3  # seconds that launchers need to pass on what ranks have printed; Abort makes them drop the rest


class Stopped(SystemExit):
    """All ranks exit, because of a `Stop`."""


@contextlib.contextmanager
def exit_by(
    comm: MPI.Intracomm,
    position: Callable[[], str],
    failing: Callable[[BaseException], object],
    shows_traceback: bool = False,
) -> Iterator[None]:
    """Turn a `Stop` into a SystemExit. Any other error is this rank's alone and ends all ranks, if there are others.

    position         where this rank is in its list, for the message
    failing          is called before all ranks are ended
    shows_traceback  whether the whole traceback is printed
    """
    try:
        yield
    except Stop as stop:
        if shows_traceback and stop.__cause__ is not None:
            traceback.print_exception(stop.__cause__)
        if comm.rank == stop.speaker:
            print(f"mpirun: {stop}", file=sys.stderr, flush=True)
        raise Stopped(stop.code) from None
    except BaseException as error:
        if "allow_non_fake_inputs" in str(error):  # in torch's words for a tensor that the trial has left
            error.add_note(
                "a forward has kept a tensor of the trial, which has no values, outside of its module, for example in "
                "a cache: keep it in the module, as a buffer"
            )
        if comm.size == 1 and isinstance(error, UsageError | RefusedFile):
            print(f"mpirun: {error}", file=sys.stderr, flush=True)
            raise SystemExit(error.code) from None
        if comm.size == 1 and (where := position()):
            error.add_note(f"mpirun: in {where.rstrip(': ')}")
        if comm.size == 1 or isinstance(error, Stopped):
            raise
        failing(error)
        end_all_ranks(comm, position(), error, shows_traceback)


def end_all_ranks(comm: MPI.Intracomm, position: str, error: BaseException, shows_traceback: bool) -> NoReturn:
    """Print one message, then end all ranks: without Abort the others would wait for this one for ever.

    Often all ranks fail alike, or are interrupted: then rank 0 speaks for them.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    code = 130 if interrupted else 1
    where = "" if interrupted and not comm.rank else f"rank {comm.rank} on {socket.gethostname()}: {position}"
    try:
        with contextlib.suppress(KeyboardInterrupt):
            if comm.rank:
                time.sleep(3 * PASSED_ON)  # rank 0, if it ends, too, ends this one
            if shows_traceback and not interrupted:
                traceback.print_exception(error)
            what = "interrupted" if interrupted else f"{raised(error)}{raised_at(error)}"
            print(f"mpirun: {where}{what}", file=sys.stderr, flush=True)
            time.sleep(PASSED_ON)
    finally:
        comm.Abort(code)
    raise SystemExit(code)


def end_on_error(comm: MPI.Intracomm, error: BaseException) -> NoReturn:
    """End all ranks because of an exception in the script's own code, with its whole traceback, or of Ctrl-C."""
    end_all_ranks(comm, "", error, not isinstance(error, UsageError | RefusedFile))


def end_on_uncaught(comm: MPI.Intracomm, failing: Callable[[BaseException], object]) -> Callable[[], None]:
    """From now on an uncaught exception of the script's own code calls `failing`, and then ends all ranks.

    The function that is returned undoes this.
    """

    def hook(_: object, error: BaseException, __: object) -> None:
        failing(error)
        end_on_error(comm, error)

    def give_back() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    before, sys.excepthook = sys.excepthook, hook
    return give_back


class Sigterm:
    """What SIGTERM does to one run on this rank. A handler of the script's own stays, and then this does nothing."""

    came: ClassVar[bool] = False  # whether a signal came that no run has answered by leaving
    asked: ClassVar[int] = 0  # runs that it asks

    def __init__(self) -> None:
        self.taken = False

    def take(self) -> None:
        """From now on SIGTERM asks the run to leave after its step."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _keep):
            signal.signal(signal.SIGTERM, _keep)
            self.taken = True
            Sigterm.asked += 1

    def asks(self) -> bool:
        """Whether the run is asked to leave."""
        return Sigterm.came and self.taken

    def give_back(self) -> None:
        """The run has ended: after the last one SIGTERM has its default action again."""
        Sigterm.asked -= self.taken
        if not Sigterm.asked and signal.getsignal(signal.SIGTERM) == _keep and _is_main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.taken = False

    def end(self) -> None:
        """The run does no more steps; a signal that came counts as answered."""
        Sigterm.came = False
        self.give_back()


def _keep(*_: object) -> None:
    Sigterm.came = True


def _is_main_thread() -> bool:
    """No other thread can set a signal handler."""
    return threading.current_thread() is threading.main_thread()
