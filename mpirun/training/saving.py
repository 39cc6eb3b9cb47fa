"""The checkpoints of a run: how it saves and resumes, and what SIGTERM saves."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mpirun.checkpoint.disk_format import Manifest
from mpirun.checkpoint.writer import CheckpointWriter
from mpirun.comm.fail_together import refuse, together
from mpirun.data.loader import Loader
from mpirun.engine.running_statistics import share_buffers
from mpirun.training.session import Session
from mpirun.watchdog import SAVING


class Saving(NamedTuple):
    """How a checkpoint is saved."""

    directory: Path
    data: Loader | None  # whose position it records
    keep: int  # how many stay in the directory


class Checkpoints:
    """What a run saves, to one directory, and resumes. Every method is collective."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.directory: Path | None = None  # that the run saves to
        self.resumed: Path | None = None  # that it resumed from
        self.last: Saving | None = None  # what SIGTERM saves, and where

    @cached_property
    def writer(self) -> CheckpointWriter:
        """Writes the files, and restores from them."""
        run = self.session
        return together(run.comm, lambda: CheckpointWriter(run.part, run.interpreter.optimizer, run.schedule.sha256))

    def resume(self, manifest: Manifest, data: Loader | None) -> None:
        """Continue from a checkpoint, and `data` at its position. Stop if it is of another model or optimizer."""
        run, saved = self.session, manifest.settings
        if data is not None:
            position = saved.get("loader", {})
            unsaved = f"{manifest.folder} was saved without a position in the data: save with data="
            refuse(run.comm, not position, unsaved)
            together(run.comm, lambda: data.restore(position))
        run.interpreter.optimizer.take_assigned()
        self.writer.resume(manifest)
        self.resumed = manifest.directory
        run.resumed(manifest.step)

    def open(self, directory: Path) -> None:
        """Save to this directory from now on. Stop if another run saves there, or the run saves to another one."""
        if self.directory is None:
            self.session.end.callback(self.writer.close)
            self.writer.open(str(directory), None if self.resumed is None else str(self.resumed))
            self.directory = directory
        other = f"save: this run saves to {self.directory}, and a run has one folder: export the best"
        refuse(self.session.comm, directory != self.directory, other)

    def save(self, saving: Saving) -> bool:
        """Write a checkpoint; returns whether that succeeded.

        Running statistics are then those of the checkpoint on every rank, as after a restart.
        """
        self.open(saving.directory)
        self.last, run = saving, self.session
        self.writer.settings.pop("loader", None)
        if saving.data is not None:
            self.writer.settings["loader"] = saving.data.state()
        share_buffers(run.part)
        run.interpreter.optimizer.take_assigned()
        with run.watchdog.phase(SAVING):
            return self.writer.save(run.steps, saving.keep)

    def leave(self) -> None:
        """Save as last, and end all ranks."""
        self.session.leave(self.last is not None and self.save(self.last))
