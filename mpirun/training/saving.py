"""How a script saves, and what of that SIGTERM does again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from mpirun.data.loader import Loader

KEEP_ALL = sys.maxsize  # how many checkpoints stay where nobody has said it


class Saving(NamedTuple):
    """How a checkpoint is saved."""

    directory: Path
    data: Loader | None  # whose position it records
    keep: int  # how many stay in the directory


def at_sigterm(now: Saving, before: Saving | None, resumed: Saving | None) -> Saving:
    """What SIGTERM saves after `now` has been saved: what a restart will resume.

    before   what it would have saved
    resumed  the directory and the data that the run went on with
    """
    if before is None and resumed is not None and resumed.data is not None:
        before = resumed
    if before is None or now.data is not None:
        return now
    if before.data is not None:  # a checkpoint without a position in the data is no place to go on from
        return before._replace(keep=now.keep) if now.directory == before.directory else before
    return now if now.directory in (before.directory, resumed and resumed.directory) else before
