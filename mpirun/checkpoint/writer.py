"""Writes the checkpoints of a run: which rank writes what, and when a checkpoint counts.

Each owner writes what it owns, under the parameters' names in the model. Of several owners of a stage one writes it; if
they divide its weights, this one gathers their shards first, and that of a stage's first slice the shares of others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpirun.checkpoint import disk_format
from mpirun.checkpoint.disk_format import CheckpointFile, Manifest
from mpirun.checkpoint.gather import untrained_entries, written_entries
from mpirun.checkpoint.reader import check_all_read, restore
from mpirun.comm.fail_together import Stop, on_rank_0, refuse, together
from mpirun.comm.output import note, say
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.setup import RankPart
from schedgen.util.errors import UsageError

LOCK = ".lock"


class CheckpointWriter:
    """One rank's part of all checkpoints of a run."""

    def __init__(self, part: RankPart, optimizer: Optimizer, schedule: str) -> None:
        """`schedule`: its SHA-256. Collective.

        Stop if two parts of the model would have one entry name, or a module has state other than tensors.
        """
        self.part, self.optimizer = part, optimizer
        self.comm = comm = part.comm
        names = sorted(set().union(*comm.allgather(optimizer.names)))
        self.settings = _settings(part, " and ".join(names), schedule)
        _, untrained = untrained_entries(part)
        together(comm, lambda: self._check_entries(untrained))
        self.directory: Path | None = None
        self.lock: int | None = None  # on rank 0, the file that holds it
        self.last = 0

    def _check_entries(self, untrained: list[str]) -> None:
        setup = self.part.setup
        model, shapes = setup.unsliced_model, [setup.shapes[stage] for stage in self.part.header.first_slices]
        names = ((s, name) for s, shape in enumerate(shapes) for name in shape.parameter_names)
        counts = Counter(model.entry_name(*key) for key in names)
        counts.update(set(untrained) if model.origin.named else untrained)
        tied = {model.entry_name(*key) for tie in model.tied for key in tie}
        for entry, count in counts.items():
            if count > 1 and entry not in tied:
                raise UsageError(f"two layers of the model have a {entry}: in checkpoints names must differ")

    def resume(self, manifest: Manifest) -> None:
        """Restore all that this rank has of the model, and report which options differ. Collective."""
        comm = self.comm
        name, saved_name = self.settings["optimizer"], manifest.settings["optimizer"]
        other = f"the optimizer is {name}: {manifest.folder} was made with {saved_name}"
        refuse(comm, name != saved_name, other)
        read = comm.gather(together(comm, lambda: restore(manifest, self.part, self.optimizer)))
        on_rank_0(comm, lambda: check_all_read(manifest, read or ()))
        self.last = manifest.step
        if comm.rank == 0:
            say(f"resumed after step {manifest.step}: {manifest.folder}", sys.stdout)
            saved, options = manifest.settings["options"], self.settings["options"]
            for name in [name for name in {**saved, **options} if saved.get(name) != options.get(name)]:
                note(comm, f"the checkpoint was made with {name} {saved.get(name)}, not {options.get(name)}")

    def open(self, directory: str, resumed: str | None) -> None:
        """Save to a directory from now on. Collective.

        Stop if another run saves there, or if it has checkpoints and is not the `resumed` one.
        """
        path = Path(directory)
        self.lock = on_rank_0(self.comm, lambda: _locked(path, resumed))
        if self.comm.rank == 0:
            disk_format.remove_unfinished(path)
        self.directory = path

    def close(self) -> None:
        """Release the lock, so that other runs may save; this run saves no more."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def save(self, step: int, keep: int, state: bytes = b"") -> bool:
        """Write a checkpoint after `step` steps, and keep the newest `keep`; False if that failed. Collective.

        `state`: this rank's of the script, as `state_bytes` makes it; if all ranks have the same, one writes it.
        """
        comm, directory = self.comm, self.directory
        assert directory is not None
        together(comm, self.optimizer.check_saved)
        begin = time.perf_counter()
        differs = len(set(comm.allgather(hashlib.sha256(state).digest()))) > 1
        written = state if differs or (state and comm.rank == 0) else None
        try:
            on_rank_0(comm, lambda: disk_format.begin(directory, step))
            weights, kept = written_entries(self.part, self.optimizer.state)
            of_ranks = comm.gather(together(comm, lambda: self._write_files(directory, step, weights, kept, written)))
            files = [file for of_rank in of_ranks or () for file in of_rank]
            on_rank_0(comm, lambda: disk_format.publish(directory, step, self.settings, files))
            on_rank_0(comm, lambda: disk_format.prune(directory, step, keep))
        except Stop as stop:
            if comm.rank == 0:
                disk_format.remove_unfinished(directory)
                last = f"the last one is that of step {self.last}" if self.last else "there is none"
                say(f"mpirun: no checkpoint of step {step}: {stop}; {last}", sys.stderr)
            return False
        self.last = step
        if comm.rank == 0:
            folder = disk_format.step_folder(directory, step)
            say(f"checkpoint of step {step}: {folder}, {time.perf_counter() - begin:.1f} s", sys.stdout)
        return True

    def _write_files(
        self, directory: Path, step: int, weights: Mapping[str, Tensor], kept: Mapping[str, Any], state: bytes | None
    ) -> list[CheckpointFile]:
        files = [] if state is None else [disk_format.write_state(directory, step, self.comm.rank, state)]
        for kind, entries in (("weights", weights), ("optimizer", kept)):
            if entries:
                files.append(disk_format.write_file(directory, step, kind, self.comm.rank, entries))
                self.part.beat()
        return files


def _settings(part: RankPart, optimizer: str, schedule: str) -> dict[str, Any]:
    """The manifest's entries besides step and files; `options` are those that a resumed run should have, too."""
    header, setup = part.header, part.setup
    options = {
        "seed": setup.seed,
        "microbatches": header.microbatches,
        **setup.recipe.settings,
        "autocast": "bf16" if setup.autocast_dtype else None,
        "weight versions": header.lowering.get("updates"),
        "threads": torch.get_num_threads() if setup.device.torch.type == "cpu" else None,  # bits of sums depend on it
    }
    return {
        "optimizer": optimizer,
        "schedule": {"sha256": schedule, "scheme": dict(header.scheme)},
        "options": {option: value for option, value in options.items() if value is not None},
    }


def lock_folder(folder: Path) -> int:
    """Lock a folder of checkpoints, where one run at a time saves, until the file that is returned is closed.

    UsageError if another run has the lock. If the file system has no locks, a note says so.
    """
    with disk_format.refusing(folder):
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # it stays
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        why = "another run saves there, or an earlier Engine of this script, which is not closed"
        raise UsageError(f"saving to {folder}: {why}") from None
    except OSError:
        say(f"mpirun: note: {folder}: its file system has no locks: let one run save there at a time", sys.stderr)
    return file


def _locked(directory: Path, resumed: str | None) -> int:
    """Make the folder and lock it; UsageError if that fails, or if it has checkpoints and is not the `resumed` one."""
    with disk_format.refusing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        is_checkpoint = (directory / disk_format.MANIFEST).exists()
    if is_checkpoint:
        raise UsageError(f"saving to {directory}: it is a checkpoint itself: save to another folder")
    lock = lock_folder(directory)
    if disk_format.step_folders(directory) and (resumed is None or Path(resumed).resolve() != directory.resolve()):
        os.close(lock)
        others = "it has checkpoints of another run: resume from it, move it, or save elsewhere"
        raise UsageError(f"saving to {directory}: {others}")
    return lock
