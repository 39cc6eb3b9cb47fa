"""SIGTERM, which Slurm sends before the time is up: a run leaves after its step, or is ended at once.

Several runs may be open in one process: one may only evaluate while another steps. A signal goes to all of them, and to
those that begin later, until one has left.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

ASKED_TWICE = 10.0  # seconds after which a second SIGTERM ends the rank at once


class Sigterm:
    """What SIGTERM does to one run on this rank. A handler of the script's own stays, and then this does nothing."""

    came: ClassVar[float | None] = None  # when the first signal came that no run has answered by leaving

    def __init__(self, leave: Callable[[], None], end: Callable[[], None]) -> None:
        """`leave`: asks the run to leave after its step; `end`: is called before SIGTERM ends this rank."""
        self.leave, self.end = leave, end
        self.after_step = False  # whether the run leaves after its step; else the rank is ended at once
        self.asked = False  # whether the run was asked to leave
        self.unsaved: Callable[[], str] = str  # what would be lost if the run ended now; empty: nothing
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._take()

    def leave_after_step(self) -> None:
        """From now on SIGTERM means: leave after the step; again after `ASKED_TWICE` (Slurm sends two): end at once."""
        self.after_step = True
        self._take()
        if Sigterm.came is not None and self in _runs:
            self.ask()

    def ask(self) -> None:
        """Ask the run to leave, unless that has been done."""
        if not self.asked:
            self.asked = True
            self.leave()

    @property
    def is_alone(self) -> bool:
        """Whether this is the only open run of the process, so that a signal goes to no other."""
        return _runs == [self]

    def lost(self) -> list[str]:
        """What is lost of the other open runs of the process if this one ends it."""
        return [lost for run in _runs if run is not self and (lost := run.unsaved())]

    def end_at_once(self) -> None:
        """From now on SIGTERM ends the process: there are no more steps. An earlier signal counts as answered."""
        self.after_step, Sigterm.came = False, None

    def give_back(self) -> None:
        """Unregister this run, which has ended. After the last run SIGTERM has its default action again."""
        if self in _runs:
            _runs.remove(self)
        if not _runs and signal.getsignal(signal.SIGTERM) == _on_sigterm and _sets_signals():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _take(self) -> None:
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_sigterm) and _sets_signals():
            if self in _runs:
                _runs.remove(self)
            _runs.append(self)
            signal.signal(signal.SIGTERM, _on_sigterm)


_runs: list[Sigterm] = []  # the runs that a signal goes to, in the order in which they registered


def _on_sigterm(*_: object) -> None:
    last, now = _runs[-1] if _runs else None, time.monotonic()
    if last is None or not last.after_step or now - (Sigterm.came or now) > ASKED_TWICE:
        # The signal ends this rank, as by default; the watchdog reports it, and ends the others.
        for run in _runs:
            run.end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        return
    Sigterm.came = Sigterm.came or now
    for run in _runs:
        if run.after_step:
            run.ask()


def _sets_signals() -> bool:
    """Whether this is the main thread: no other can set a signal handler."""
    return threading.current_thread() is threading.main_thread()
