"""The checkpoints of a run: how it saves and resumes, and what SIGTERM saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from mpirun.checkpoint.disk_format import Manifest, read_state, state_bytes
from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.checkpoint.writer import CheckpointWriter
from mpirun.comm.fail_together import Stop, refuse, together
from mpirun.comm.output import note
from mpirun.data.loader import Loader
from mpirun.engine.running_statistics import share_buffers
from mpirun.training.arguments import check_data, directory_of
from mpirun.training.session import Session
from mpirun.watchdog import SAVING


class Saving(NamedTuple):
    """How a checkpoint is saved."""

    directory: Path
    data: Loader | None  # whose position it records
    keep: int  # how many stay in the directory


def beside(session: Session, directory: Path, use: Callable[[Path], object]) -> Path:
    """Use a directory; where that fails after steps that would be lost, the first one beside it that can be used.

    `use`: raises a Stop on all ranks. Returns the directory that is used; Stop if there is none. Collective.
    """
    refused: Stop | None = None
    for number in range(1, 10 if session.steps > session.begun else 2):
        folder = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        try:
            use(folder)
        except Stop as stop:
            refused = refused or stop
            continue
        if refused is not None:
            note(session.comm, f"{refused}; this goes to {folder}, so that no step is lost")
        return folder
    assert refused is not None
    raise refused


class Checkpoints:
    """What a run saves, to one directory, and resumes. Every method is collective."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.directory: Path | None = None  # that the run is told to save to
        self.resumed: Path | None = None  # that it resumed from
        self.last: Saving | None = None  # what SIGTERM saves, and where

    @cached_property
    def writer(self) -> CheckpointWriter:
        """Writes the files, and restores from them."""
        run = self.session
        return together(run.comm, lambda: CheckpointWriter(run.part, run.interpreter.optimizer, run.schedule.sha256))

    def resume(self, place: str | PathLike[str] | Manifest | None, data: Loader | None) -> bool:
        """Continue from a folder's newest checkpoint, or this one, and `data` at its position; returns whether it is.

        Stop if it is of another model or optimizer.
        """
        run = self.session
        refuse(run.comm, bool(run.steps), "resume: this run has done steps already: make a new Engine")
        together(run.comm, lambda: check_data(data))
        manifest = place if isinstance(place, Manifest) else None
        if place is not None and not isinstance(place, Manifest):
            path = str(together(run.comm, lambda: directory_of("resume", place)))
            manifest = newest_checkpoint(run.comm, path, path)
        if manifest is None:
            return False
        again = "verify repeats all steps from the first, not those before a checkpoint: resume without it"
        refuse(run.comm, run.verifies, again)
        saved = manifest.settings
        if data is not None:
            position = saved.get("loader", {})
            unsaved = f"{manifest.folder} was saved without a position in the data: save with data="
            refuse(run.comm, not position, unsaved)
            together(run.comm, lambda: data.restore(position))
        run.state.update(together(run.comm, lambda: read_state(manifest, run.comm.rank, run.comm.size)))
        run.interpreter.optimizer.take_assigned()
        self.writer.resume(manifest)
        self.resumed = manifest.directory
        run.begun = run.steps = manifest.step
        run.start = None  # a checkpoint has replaced all values
        return True

    def open(self, directory: Path) -> None:
        """Save to this directory, or one beside it, from now on; Stop if that fails, or the run saves to another."""
        if self.directory is None:
            self.session.end.callback(self.writer.close)
            resumed = None if self.resumed is None else str(self.resumed)
            beside(self.session, directory, lambda folder: self.writer.open(str(folder), resumed))
            self.directory = directory
        other = f"save: this run saves to {self.directory}, and a run has one folder: export the best"
        refuse(self.session.comm, directory != self.directory, other)

    def save(self, directory: str | PathLike[str], data: Loader | None, keep: int) -> bool:
        """Write a checkpoint; returns whether that succeeded."""
        comm = self.session.comm
        together(comm, lambda: check_data(data))
        wrong = type(keep) is not int or keep < 1
        refuse(comm, wrong, f"keep should be a whole number of at least 1, not {keep!r}")
        saving = Saving(together(comm, lambda: directory_of("save", directory)), data, keep)
        try:
            self.open(saving.directory)
        except Stop as stop:
            if self.directory is not None or self.session.steps == self.session.begun:
                raise
            note(comm, f"{stop}; nothing is saved")
            return False
        return self._write(saving)

    def _write(self, saving: Saving) -> bool:
        """Write a checkpoint; returns whether that succeeded.

        Running statistics are then those of the checkpoint on every rank, as after a restart.
        """
        state = together(self.session.comm, lambda: state_bytes(self.session.state))
        self.last, run = saving, self.session
        self.writer.settings.pop("loader", None)
        if saving.data is not None:
            self.writer.settings["loader"] = saving.data.state()
        share_buffers(run.part)
        run.interpreter.optimizer.take_assigned()
        with run.watchdog.phase(SAVING):
            return self.writer.save(run.steps, saving.keep, state)

    def leave(self) -> None:
        """Save as last, and end all ranks."""
        self.session.leave(self.last is not None and self._write(self.last))
