"""How a run begins and ends in its process: what ends all ranks, and what the process gets back.

`Engine` is an `OpenRun` until `close`. Its collective methods turn a mistake into one sentence, on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Self, TypeVar

import torch

from mpirun.comm.fail_together import Stop
from mpirun.comm.waiting import RunComm
from mpirun.model.rng import GeneratorsKept
from mpirun.training.errors import end_on_error, end_on_uncaught, exit_by
from mpirun.training.session import Session

P = ParamSpec("P")
T = TypeVar("T")
Run = TypeVar("Run", bound="OpenRun")


def collective(method: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Wrap a method: its errors end all ranks, it leaves torch's generators as they were, and gradients are enabled."""

    @functools.wraps(method)
    def called(self: Run, *args: P.args, **kwargs: P.kwargs) -> T:
        with (
            self.generators,
            torch.inference_mode(False),  # a script's loop may stand in torch.no_grad()
            self._exit_by(),
            self._running.watchdog.calling(method.__name__.lstrip("_")),
        ):
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value]  # its argument is called self


class OpenRun:
    """A run that has not ended, or has not begun to build its stages."""

    def __init__(self, comm: RunComm, shows_traceback: bool) -> None:
        self.comm, self.generators = comm, GeneratorsKept()
        self._exit_by = functools.partial(exit_by, comm, self._position, self._failing, shows_traceback)
        self.session: Session | None = None
        self._steps_at_end = 0  # steps, once the run has ended
        self._ending = contextlib.ExitStack()  # restores what the process had before the run

    @property
    def steps(self) -> int:
        """Steps done, including those before a checkpoint; the count stays when the run has ended."""
        return self._steps_at_end if self.session is None else self.session.steps

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Inside, what a constructor does; a mistake ends the run on all ranks."""
        with self.generators, self._exit_by():
            try:
                if self.comm.size > 1:
                    self._ending.callback(end_on_uncaught(self.comm, self._failing))
                yield
            except Exception as error:
                if isinstance(error, Stop) or self.comm.size == 1:
                    self._end()  # the process, as a notebook's, may start another run
                raise

    def _free(self) -> None:
        """Free what is collective to free."""

    def close(self) -> None:
        """End the run; another Engine may follow in this process. Collective."""
        if self.session is None:
            return
        self.session.wait_for_others()
        self._free()
        self._end()

    def __enter__(self) -> Self:
        """The run itself, which is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close. An exception that leaves the block ends the other ranks, whether or not this one would catch it."""
        if self.session is None:
            return
        if error is None or isinstance(error, SystemExit | Stop):  # it ends all ranks
            self.close()
        elif self.comm.size == 1:
            self._end()
        else:
            self._failing(error)
            end_on_error(self.comm, error)

    def _end(self) -> None:
        if self.session is not None:
            self._steps_at_end = self.session.steps
            self.session.close()
            self.session = None
        self._ending.close()

    @property
    def _running(self) -> Session:
        if self.session is None:
            raise Stop("the Engine is closed")
        return self.session

    def _failing(self, error: BaseException) -> None:
        """Tell the watchdog that this rank reports by itself why it ends."""
        if self.session is not None:
            self.session.watchdog.end(type(error), error, None)

    def _position(self) -> str:
        return "" if self.session is None else self.session.position()
