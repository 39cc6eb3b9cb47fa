"""The checkpoints of a script: how it saves, what SIGTERM saves, and from which checkpoint the run resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mpirun.checkpoint.disk_format import Manifest
from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.comm.fail_together import Stop, refuse, together
from mpirun.comm.output import note
from mpirun.data.loader import Loader
from mpirun.training.batches import InputOrder
from mpirun.training.session import Session

KEEP_ALL = sys.maxsize  # how many checkpoints stay if the script has not said how many
SAMPLED = 1024  # bytes of a unit's weights that tell whether a script has changed them


class Saving(NamedTuple):
    """How a checkpoint is saved."""

    directory: Path
    data: Loader | None  # whose position it records
    keep: int  # how many stay in the directory


class Checkpoints:
    """What a script's run saves and resumes. Every method is collective."""

    def __init__(self, session: Session, order: InputOrder) -> None:
        """Nothing is saved or resumed yet; `order`: of the run's inputs, which checkpoints record."""
        self.session, self.order = session, order
        self.at_sigterm: Saving | None = None  # what SIGTERM saves, and where
        self.resumed: Saving | None = None  # the directory and the data that the run resumed with
        self.restart: Saving | None = None  # what a restart will ask for: as `resumed`, also if nothing was found
        self.written: dict[Path, tuple[Loader | None, int]] = {}  # by directory: the data and the steps last saved
        self.stepped: list[Tensor] | None = None  # samples of this rank's weights as a step left them

    def resume(self, directory: Path, data: Loader | None) -> Manifest | None:
        """The newest whole checkpoint, whose position `data` gets; None if the directory has no checkpoint."""
        comm = self.session.comm
        manifest = newest_checkpoint(comm, str(directory), str(directory))
        asked = Saving(directory, data, KEEP_ALL)
        if data is not None or self.restart is None or self.restart.data is None:
            self.restart = asked
        if manifest is not None:
            if data is not None:
                position = manifest.settings.get("loader", {})
                unsaved = f"{manifest.folder} was saved without a position in the data: save with data="
                refuse(comm, not position, unsaved)
                together(comm, lambda: data.restore(position))
            if "inputs" in manifest.settings:  # missing in older checkpoints
                self.order.resume(manifest.settings["inputs"])
            self.resumed = asked
        return manifest

    def save(self, saving: Saving) -> bool:
        """Write a checkpoint; returns whether that succeeded."""
        self._open(saving)
        self.at_sigterm = self.at_sigterm_after(saving)
        return self._write(saving)

    def at_sigterm_after(self, now: Saving) -> Saving:
        """What SIGTERM saves after `now` has been saved: what a restart will resume."""
        before, restart = self.at_sigterm, self.restart
        if before is None and restart is not None and restart.data is not None:
            before = restart
        if before is None or now.data is not None:
            return now
        if before.data is not None:  # a restart needs a checkpoint with a position in the data
            return before._replace(keep=now.keep) if now.directory == before.directory else before
        return now if now.directory in (before.directory, restart and restart.directory) else before

    def note_step(self) -> None:
        """Record samples of the weights as a step leaves them, if SIGTERM saves, or will. Not collective."""
        self.stepped = None if self.at_sigterm is None and self.restart is None else self._samples()

    def has_step(self) -> bool:
        """Whether SIGTERM could end the run now: the last step is saved, or this rank's weights are those that it left.

        A script may exchange weights for their average in an evaluation. Not collective.
        """
        return self._is_saved() or (self.stepped is not None and all(map(torch.equal, self.stepped, self._samples())))

    def _is_saved(self) -> bool:
        """Whether this run has saved the last step where SIGTERM saves."""
        saving = self.at_sigterm
        return saving is not None and self.written.get(saving.directory) == (saving.data, self.session.steps)

    def unsaved(self) -> str:
        """How many steps of this run no checkpoint has, in words; empty: none. Not collective."""
        session, saving = self.session, self.at_sigterm or self.resumed
        count = session.steps - max([session.begun, *(steps for _, steps in self.written.values())])
        if not session.interpreters or not count:  # before the first one, `steps` are those of the checkpoint
            return ""
        steps = "1 step" if count == 1 else f"{count} steps"
        return f"{steps} of the Engine that " + ("has not saved" if saving is None else f"saves to {saving.directory}")

    def _samples(self) -> list[Tensor]:
        """Copies of some bytes of all weights that this rank owns."""
        owned = [flat for stage in self.session.interpreter.stages.values() for flat in stage.owned.values()]
        with self.session.interpreter.optimizer.assigned():
            return [flat[:: len(flat) // SAMPLED | 1].clone() for flat in owned]  # an odd step: every byte of numbers

    def leave(self) -> None:
        """Save what SIGTERM saves, unless this run has saved it already, and end all ranks."""
        saved = self._is_saved()
        if self.at_sigterm is not None and not saved:
            try:
                self._open(self.at_sigterm)
                saved = self._write(self.at_sigterm)
            except Stop as stop:
                note(self.session.comm, stop)
        if lost := self.session.sigterm.lost():
            note(self.session.comm, f"SIGTERM ends the run whose step came next: not saved: {', '.join(lost)}")
        self.session.leave(saved)

    def _open(self, saving: Saving) -> None:
        """Make this run's next checkpoints go to the directory."""
        writer = self.session.checkpoint_writer()
        if writer.directory != saving.directory:
            writer.open(str(saving.directory), None if self.resumed is None else str(self.resumed.directory))

    def _write(self, saving: Saving) -> bool:
        writer = self.session.checkpoint_writer()
        writer.settings.pop("loader", None)
        writer.settings["inputs"] = self.order.to_save
        if saving.data is not None:
            writer.settings["loader"] = saving.data.state()
        saved = self.session.save(saving.keep)
        if saved:
            self.written[saving.directory] = saving.data, self.session.steps
        return saved
