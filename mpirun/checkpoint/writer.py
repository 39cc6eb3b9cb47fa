"""Writes the checkpoints of a run: which rank writes what, and when a checkpoint counts.

Each owner writes what it owns, under the parameters' names in the model. Of several owners of a stage one writes it; if
they divide its weights, this one gathers their shards first. Every tensor slice writes its share of a cut parameter.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint import disk_format
from mpirun.checkpoint.disk_format import CheckpointFile, Manifest
from mpirun.checkpoint.entry_names import first_stages, parameter_entries, written_untrained
from mpirun.checkpoint.gather import PARAMETER, Values, gather_parameters, writing_rank
from mpirun.checkpoint.lock import FolderLock
from mpirun.checkpoint.reader import check_all_read, restore
from mpirun.checkpoint.run_settings import differing_settings, other_threads, run_settings
from mpirun.comm.fail_together import Stop, on_rank_0, together
from mpirun.comm.output import note, say
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.setup import Setup
from mpirun.engine.stage import LocalStage
from mpirun.model.module_tensors import temporary_buffers
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError, listed


class CheckpointWriter:
    """One rank's part of all checkpoints of a run."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        header: Header,
        setup: Setup,
        stages: Mapping[int, LocalStage],
        optimizer: Optimizer,
        beat: Callable[[], None],
        schedule: str,
    ) -> None:
        """`beat`: is called after each file; `schedule`: its SHA-256. Collective.

        UsageError if two parts of the model would have one entry name, or a module has state other than tensors.
        """
        self.comm, self.header, self.setup, self.stages, self.optimizer = comm, header, setup, stages, optimizer
        self.beat = beat
        descriptions = [found for found in comm.allgather(optimizer.description()) if found is not None]
        name, settings, _ = descriptions[0] if descriptions else ("", {}, [])
        groups = [options for *_, of_rank in descriptions for options in of_rank]
        self.settings = run_settings(header, setup, (name, settings), groups, schedule, comm.rank)
        written = [stage for index, stage in stages.items() if writing_rank(header, index) == comm.rank]
        own = [(entry, stage.index) for stage in written for entry in written_untrained(setup.model, stage)]
        untrained = [pair for of_rank in comm.allgather(own) for pair in of_rank]
        self.first_stage = first_stages(untrained)  # by untrained entry: the stage that it is written with
        self._check_entries([entry for entry, _ in untrained])
        self._note_unsaved(written)
        self.directory: Path | None = None
        self.lock: FolderLock | None = None  # on rank 0
        self.last = 0

    def _check_entries(self, untrained: list[str]) -> None:
        model = self.setup.unsliced_model
        shapes = [self.setup.shapes[stage] for stage in self.header.first_slices]
        names = ((s, name) for s, shape in enumerate(shapes) for name in shape.parameter_names)
        counts = Counter(model.entry_name(*key) for key in names)
        counts.update(list(self.first_stage) if self.setup.model.origin.named else untrained)
        tied = {model.entry_name(*key) for tie in model.tied for key in tie}
        for entry, count in counts.items():
            if entry.endswith("_extra_state"):
                raise UsageError(f"the model has {entry}: checkpoints hold parameters and buffers only")
            if count > 1 and entry not in tied:
                raise UsageError(f"two layers of the model have a {entry}: in checkpoints names must differ")

    def _note_unsaved(self, written: Sequence[LocalStage]) -> None:
        """Name the buffers that forwards change and modules do not save; `written`: stages that this rank writes."""
        model, shapes = self.setup.model, self.setup.shapes
        own = [
            model.entry_name(stage.index, name)
            for stage in written
            for name in sorted(temporary_buffers(stage.module).intersection(shapes[stage.index].changed_buffers))
        ]
        if unsaved := dict.fromkeys(name for of_rank in self.comm.gather(own) or () for name in of_rank):
            what = "which checkpoints do not have (persistent=False): after a restart they begin anew"
            note(self.comm, f"forwards change the buffers {listed(unsaved)}, {what}")

    def resume(self, manifest: Manifest) -> None:
        """Restore all that this rank has of the model, and report which settings differ. Collective."""
        comm, setup, stages, optimizer = self.comm, self.setup, self.stages, self.optimizer
        own = together(comm, lambda: restore(manifest, setup, stages, optimizer, self.settings, self.beat))
        read = comm.gather(own)
        on_rank_0(comm, lambda: check_all_read(manifest, read or ()))
        self.last = manifest.step
        if self.comm.rank == 0:
            say(f"resumed after step {manifest.step}: {manifest.folder}", sys.stdout)
            differing = differing_settings(manifest.settings, self.settings)
            for words in [*differing, *other_threads(manifest.settings, self.settings)]:
                note(comm, f"the checkpoint was made with {words}")
            for kept in ("threads", "sums"):
                self.settings[kept] = [*manifest.settings[kept], *self.settings[kept]]
            self.settings["changed"] = [*manifest.settings["changed"], *differing]

    def open(self, directory: str, resumed: str | None) -> None:
        """Save to a directory from now on. Collective.

        UsageError if another run saves there, if ranks do not see one folder, or if it has checkpoints and is not the
        `resumed` one.
        """
        path = Path(directory)
        self.lock = on_rank_0(self.comm, lambda: _locked(path, resumed))
        on_rank_0(self.comm, lambda: _make_seen(path))
        together(self.comm, lambda: _check_visible(path))
        on_rank_0(self.comm, lambda: _tidy(path))
        self.directory = path

    def close(self) -> None:
        """Release the lock, so that other runs may save; this run saves no more."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def save(self, step: int, keep: int) -> bool:
        """Write a checkpoint after `step` steps, and keep the newest `keep`; False if that failed. Collective."""
        comm, directory = self.comm, self.directory
        assert directory is not None
        together(comm, self.optimizer.check_saved)
        begin = time.perf_counter()
        try:
            on_rank_0(comm, lambda: disk_format.begin(directory, step))
            divided = self._gather_divided()
            of_ranks = comm.gather(together(comm, lambda: self._write_files(directory, step, divided)))
            files = [file for of_rank in of_ranks or () for file in of_rank]
            on_rank_0(comm, lambda: disk_format.publish(directory, step, {"step": step, **self.settings}, files))
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

    def _gather_divided(self) -> dict[int, list[Values]]:
        """The values of every parameter, by stage, of stages with divided weights that this rank writes. Collective."""
        gathered: dict[int, list[Values]] = {}
        for index, shape in enumerate(self.setup.shapes):
            if not self.header.is_sharded(index):
                continue

            def kept(shard: int) -> Sequence[Values]:
                return self.optimizer.state((index, shard)) or ()

            root, stage = writing_rank(self.header, index), self.stages.get(index)
            values = gather_parameters(self.comm, root, stage, shape.layout, kept, self.beat)
            if root == self.comm.rank:
                gathered[index] = values
        return gathered

    def _write_files(self, directory: Path, step: int, divided: Mapping[int, list[Values]]) -> list[CheckpointFile]:
        """Write this rank's files; `divided`: what `_gather_divided` returned."""
        weights: Values = {}
        kept: Values = {}
        for index, stage in self.stages.items():
            if writing_rank(self.header, index) != self.comm.rank or self.setup.model.is_replica(index):
                continue
            if index in divided:
                values = divided[index]
            else:
                of_optimizer = self.optimizer.state((index, -1)) or [{} for _ in stage.names]
                views = stage.views(stage.weights)
                values = [{PARAMETER: view, **more} for view, more in zip(views, of_optimizer, strict=True)]
            for entry, of_parameter in zip(parameter_entries(self.setup.model, stage), values, strict=True):
                if entry is not None:
                    weights[entry] = of_parameter.pop(PARAMETER).detach()
                    kept |= {f"{entry}.{key}": value for key, value in of_parameter.items()}
            weights |= self._cloned(index)
        files = []
        for kind, entries in (("weights", weights), ("optimizer", kept)):
            if entries:
                files.append(disk_format.write_file(directory, step, kind, self.comm.rank, entries))
                self.beat()
        return files

    def _cloned(self, stage: int) -> Iterable[tuple[str, Tensor]]:
        """Copies of the untrained entries of a stage: the format takes no views, nor tensors that share memory."""
        for entry, value in written_untrained(self.setup.model, self.stages[stage]).items():
            if self.first_stage[entry] == stage:
                yield entry, value.detach().clone(memory_format=torch.contiguous_format)


def _locked(directory: Path, resumed: str | None) -> FolderLock:
    """Make the folder and lock it; UsageError if that fails, or if it has checkpoints and is not the `resumed` one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_checkpoint = (directory / disk_format.MANIFEST).exists()
    except OSError as error:
        raise UsageError(f"saving to {directory}: {error.strerror}") from None
    if is_checkpoint:
        raise UsageError(f"saving to {directory}: it is a checkpoint itself: save to another folder")
    lock = FolderLock(directory)
    if disk_format.step_folders(directory) and (resumed is None or Path(resumed).resolve() != directory.resolve()):
        lock.release()
        others = "it has checkpoints of another run: resume from it, move it, or save elsewhere"
        raise UsageError(f"saving to {directory}: {others}")
    return lock


def _make_seen(directory: Path) -> None:
    """Make a file by which other ranks tell that they see the same folder."""
    with disk_format.refusing(directory):
        (directory / ".seen").write_bytes(b"")


def _check_visible(directory: Path) -> None:
    if not (directory / ".seen").exists():
        raise UsageError(f"saving to {directory}: not all hosts see the same folder")


def _tidy(directory: Path) -> None:
    (directory / ".seen").unlink(missing_ok=True)
    disk_format.remove_unfinished(directory)
