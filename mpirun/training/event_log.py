"""TensorBoard's events of each step's numbers, which `log="DIRECTORY"` asks for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpirun.comm.output import say
from schedgen.util.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EventLog:
    """Writes a step's numbers to a directory. If that fails, as on a full disk, a note says so, and the run continues.

    Of an earlier run that saved before its last step, TensorBoard shows the steps before this run's first one alone.
    """

    def __init__(self, directory: str) -> None:
        """Make the directory. UsageError if that is impossible, or TensorBoard's package is missing."""
        if not directory:
            raise UsageError("log='' is no directory")
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise UsageError(f"log={directory!r} needs the package tensorboard") from None
        self.place = directory
        if "://" not in directory:
            self.place = str(Path(directory).absolute())  # the script may change its folder
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"log={directory!r}: {error.strerror}") from None
        self.before = self._files()
        self.writer: SummaryWriter | None = None
        self.failed = False

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers after so many steps."""
        if self.failed:
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self.writer is None:
                goes_on = step > 1 and self._files() == self.before  # else the script writes there, too
                self.writer = SummaryWriter(self.place, purge_step=step if goes_on else None)
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()
        except OSError as error:
            self.failed = True
            why = error.strerror or error
            say(f"mpirun: note: log {self.place}: {why}: no more numbers are written there", sys.stderr)

    def _files(self) -> set[str]:
        place = Path(self.place)
        return {path.name for path in place.iterdir()} if place.is_dir() else set()

    def close(self) -> None:
        """Close the files."""
        with contextlib.suppress(OSError):
            if self.writer is not None:
                self.writer.close()
