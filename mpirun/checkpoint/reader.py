"""Reads checkpoints: finds the newest whole one, and restores from it what a rank has of the model.

A rank looks for what it needs by name, so that a run continues under any schedule, whichever one the checkpoint was
written under. A tensor slice takes its share of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint import disk_format
from mpirun.checkpoint.disk_format import Manifest
from mpirun.checkpoint.gather import known_names, untrained_tensors
from mpirun.comm.fail_together import Stop, from_rank_0, on_rank_0, together
from mpirun.comm.output import say
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.setup import RankPart
from mpirun.model.build_stage import unused_names
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import SlicedDim
from mpirun.model.stage_shape import Piece, pieces
from schedgen.util.errors import UsageError, listed


def newest_checkpoint(comm: MPI.Intracomm, resume: str, save: str | None) -> Manifest | None:
    """The newest whole checkpoint in `resume`; Stop if there is none. Collective.

    None if there is no checkpoint at all and `save` is the same folder: the first start of a command to be repeated.
    """
    directory = Path(resume)
    folders = from_rank_0(comm, lambda: disk_format.step_folders(directory))
    for folder in folders:
        try:
            manifest = from_rank_0(comm, lambda: disk_format.read_manifest(folder))

            def verify() -> None:  # the ranks share the files
                for file in manifest.files[comm.rank :: comm.size]:
                    disk_format.verify_file(folder, file)

            together(comm, verify)
            return manifest._replace(directory=directory)
        except Stop as stop:
            if comm.rank == 0:
                say(f"mpirun: {stop}: skipped", sys.stderr)
    if not folders and save and Path(save).resolve() == directory.resolve():
        return None
    reason = "no checkpoint there is complete" if folders else "there is no checkpoint"
    raise Stop(f"resuming from {directory}: {reason}", 1)


def restore(manifest: Manifest, part: RankPart, optimizer: Optimizer) -> set[str]:
    """Restore stages and their optimizer state; returns the entries of the weights that were read.

    UsageError if the checkpoint is of another model.
    """
    weights, kept = (manifest.entry_files(kind) for kind in ("weights", "optimizer"))
    of_parameter: dict[str, list[str]] = {}  # entries of the optimizer
    for entry in kept:
        of_parameter.setdefault(entry.rpartition(".")[0], []).append(entry)
    read: set[str] = set()
    for stage in part.stages.values():
        reader = _StageReader(manifest.folder, part.setup.model, stage)
        read.update(reader.names)
        reader.restore_weights(disk_format.read_entries(weights, reader.names))
        reader.restore_optimizer(kept, of_parameter, optimizer)
        part.beat()
    return read


def load_whole(part: RankPart, state: Mapping[str, Tensor]) -> None:
    """Give the model the values of rank 0's `state`, under any names that the whole model has for them. Collective.

    Stop if names are missing or unexpected, or a value does not fit.
    """
    comm, model, stages = part.comm, part.setup.model, part.stages
    known = {names[0]: names for of_rank in comm.allgather(known_names(model, stages)) for names in of_rank}
    values = on_rank_0(comm, lambda: _by_entry(state, known)) or {}
    readers = {index: _StageReader(Path("load_state_dict"), model, stage) for index, stage in stages.items()}
    wanted = comm.allgather({index: reader.names for index, reader in readers.items()})
    for index in range(part.header.stages):  # one at a time: a rank need not have memory for all
        entries = {entry for of_rank in wanted for entry in of_rank.get(index, ())}
        of_stage = comm.bcast({entry: values[entry].cpu() for entry in entries & values.keys()})
        together(comm, lambda: readers[index].restore_weights(of_stage) if index in readers else None)
        part.beat()
    for name, (entry, *_) in unused_names(model).items():
        value, tensor = comm.bcast(values[entry].cpu() if comm.rank == 0 else None), model.origin.unused[name]
        if not tensor.is_meta:
            tensor.data.copy_(value)


def _by_entry(state: Mapping[str, Tensor], known: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """The values by entry; `known`: by entry, the names that it may have. UsageError if they are not all of these."""
    given = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    wrong = {
        "missing": [entry for entry, names in known.items() if given.keys().isdisjoint(names)],
        "unexpected": given.keys() - {name for names in known.values() for name in names},
    }
    if found := [f"{what}: {listed(sorted(names))}" for what, names in wrong.items() if names]:
        raise UsageError(f"load_state_dict: {'; '.join(found)}")
    return {entry: given[name] for entry, names in known.items() for name in names if name in given}


def check_all_read(manifest: Manifest, read: Iterable[Collection[str]]) -> None:
    """UsageError if a checkpoint has weights that no rank has read; `read`: by rank, what `restore` returned."""
    left = set(manifest.entry_files("weights")).difference(*read)
    if left:
        what = f"{len(left)} of its entries, such as {min(left)}"
        raise UsageError(f"{manifest.folder}: no stage has {what}: is it of a larger model?")


class _StageReader:
    def __init__(self, folder: Path, model: Model, stage: LocalStage) -> None:
        self.folder, self.model, self.stage, self.slice = folder, model, stage, model.slice_of(stage.index)
        self.entries = [model.entry_name(stage.index, name) for name in stage.names]
        self.places = dict(zip(self.entries, stage.layout, strict=True)) if stage.owned else {}
        self.dims = {model.entry_name(stage.index, name): dim for name, dim in stage.shape.sliced_dims.items()}
        self.untrained = {model.entry_name(stage.index, name): x for name, x in untrained_tensors(stage).items()}
        self.names = [*self.untrained, *self.places]  # of what it restores

    def restore_weights(self, values: dict[str, Tensor]) -> None:
        """Restore frozen parameters, buffers, and the weights that this rank owns, from values by entry."""
        for entry, target in self.untrained.items():
            value = self._checked(entry, values.get(entry), target.shape, target.dtype, self.dims.get(entry))
            with torch.no_grad():
                target.copy_(value)
        for entry, place in self.places.items():
            values[entry] = self._checked(entry, values.get(entry), place.size, place.dtype, self.dims.get(entry))
        for shard, flat in self.stage.owned.items():
            targets = self.stage.views_of_shard(shard, flat)
            for target, (entry, piece) in zip(targets, self._of_shard(shard), strict=True):
                target.copy_(values[entry] if piece is None else piece.of_parameter(values[entry]))

    def restore_optimizer(
        self, kept: Mapping[str, Path], of_parameter: Mapping[str, Sequence[str]], optimizer: Optimizer
    ) -> None:
        """Restore the optimizer state of owned weights; `of_parameter`: the state's entries, by the parameter's."""
        parameters = {state: entry for entry in self.places for state in of_parameter.get(entry, ())}
        dims = {state: self.dims[entry] for state, entry in parameters.items() if entry in self.dims}
        values = disk_format.read_entries(kept, list(parameters))
        for state, entry in parameters.items():
            value, dim = values[state], dims.get(state) if self.slice.count > 1 else None
            as_saved = -1 in self.stage.owned and dim is None  # whole when saved, and whole now
            if not as_saved and isinstance(value, Tensor) and value.dim():
                values[state] = self._checked(state, value, self.places[entry].size, value.dtype, dim)
        for shard in self.stage.owned:
            restored: list[dict[str, Any]] = []
            for entry, piece in self._of_shard(shard):
                states = {state.rpartition(".")[2]: values[state] for state in of_parameter.get(entry, ())}
                if piece is not None:  # several pieces may be on this rank, each with its own numbers
                    states = {
                        key: (piece.of_parameter(value) if value.dim() else value).clone()
                        if isinstance(value, Tensor)
                        else value
                        for key, value in states.items()
                    }
                restored.append(states)
            optimizer.restore((self.stage.index, shard), restored)

    def _of_shard(self, shard: int) -> list[tuple[str, Piece | None]]:
        """What a shard of the weights holds, in its order: a parameter's entry, and which piece of it; None: all."""
        if shard < 0:
            return [(entry, None) for entry in self.entries]
        return [(self.entries[p.parameter], p) for p in pieces(self.stage.layout, self.stage.shard_spans[shard])]

    def _checked(
        self, entry: str, value: Tensor | None, shape: torch.Size, dtype: torch.dtype, dim: SlicedDim | None
    ) -> Tensor:
        """An entry's value, or this slice's share of it if cut; UsageError unless shape and type are the model's."""
        if value is None:
            raise UsageError(f"{self.folder}: has no {entry}: is it of another model?")
        expected = tuple(shape) if dim is None else dim.full_shape(shape, self.slice)
        if value.shape != expected or value.dtype != dtype:
            raise UsageError(
                f"{self.folder}: {entry} is {value.dtype} of shape {tuple(value.shape)}, "
                f"but the model's is {dtype} of shape {expected}"
            )
        return value if dim is None else dim.share(value, self.slice)
