"""The checkpoints of a script: how it saves, what SIGTERM saves, and from which checkpoint the run resumed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.comm.fail_together import refuse, together
from mpirun.data.loader import Loader
from mpirun.training.session import Session


class Saving(NamedTuple):
    """How a checkpoint is saved."""

    directory: Path
    data: Loader | None  # whose position it records
    keep: int  # how many stay in the directory


class Checkpoints:
    """What a script's run saves, to one directory, and resumes. Every method is collective."""

    def __init__(self, session: Session) -> None:
        """Nothing is saved or resumed yet."""
        self.session = session
        self.last: Saving | None = None  # what SIGTERM saves, and where
        self.resumed: Path | None = None  # the directory that the run resumed from

    def resume(self, directory: Path, data: Loader | None) -> bool:
        """Continue from the newest whole checkpoint, and `data` at its position; False if there is no checkpoint."""
        comm = self.session.comm
        manifest = newest_checkpoint(comm, str(directory), str(directory))
        if manifest is None:
            return False
        if data is not None:
            position = manifest.settings.get("loader", {})
            unsaved = f"{manifest.folder} was saved without a position in the data: save with data="
            refuse(comm, not position, unsaved)
            together(comm, lambda: data.restore(position))
        self.resumed = directory
        self.session.resume(manifest)
        return True

    def save(self, saving: Saving) -> bool:
        """Write a checkpoint; returns whether that succeeded. Stop if the run saves to another directory."""
        comm, writer = self.session.comm, self.session.checkpoint_writer()
        if self.last is None:
            writer.open(str(saving.directory), None if self.resumed is None else str(self.resumed))
        else:
            other = f"save: this run saves to {self.last.directory}, and a run has one folder: export the best"
            refuse(comm, saving.directory != self.last.directory, other)
        self.last = saving
        writer.settings.pop("loader", None)
        if saving.data is not None:
            writer.settings["loader"] = saving.data.state()
        return self.session.save(saving.keep)

    def leave(self) -> None:
        """Save as last, and end all ranks."""
        self.session.leave(self.last is not None and self.save(self.last))
