"""SIGTERM, which Slurm sends before the time is up: the run that steps next leaves after its step.

The signal is kept until a run has left, so that it also counts for one that begins later.
"""

from __future__ import annotations

import signal
import threading
from typing import ClassVar


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
