"""How a script saves, and what of that SIGTERM does again."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mpirun.data.loader import Loader


class Saving(NamedTuple):
    """How a checkpoint is saved."""

    directory: Path
    data: Loader | None  # whose position it records
    keep: int  # how many stay in the directory

    def replaces(self, before: Saving | None, resumed_from: Path | None) -> bool:
        """Whether SIGTERM saves so from now on, and not as `before`: it saves what a restart will resume."""
        if before is None or self.data is not None:
            return True
        if before.data is not None:  # a checkpoint without a position in the data is no place to go on from
            return False
        return self.directory in (before.directory, resumed_from)
