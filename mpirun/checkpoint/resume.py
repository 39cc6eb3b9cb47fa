"""--resume: the newest whole checkpoint, and what a rank takes of it.

Whoever needs something looks for its name: so a checkpoint made under one
schedule goes on under any other. Of a parameter that is cut a rank puts the
shares together, and takes one of its own from the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint import files
from mpirun.checkpoint.files import Manifest
from mpirun.checkpoint.names import rest
from mpirun.checkpoint.shares import Entries
from mpirun.comm.fail_together import Stop, from_rank_0, together
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.setup import Training
from mpirun.engine.stage import Stage
from mpirun.engine.weight_shards import Piece, pieces
from mpirun.model.contract import entry_name, shard_of
from mpirun.model.parallel_layers import Cut, Shard
from schedgen.util.errors import UsageError


def newest(comm: MPI.Intracomm, resume: str, save: str | None) -> Manifest | None:
    """The newest whole checkpoint in --resume; None where there is none at all and --save is the same. Collective."""
    directory = Path(resume)
    folders = from_rank_0(comm, lambda: files.folders(directory))
    for folder in folders:
        try:
            return _whole(comm, folder)
        except Stop as stop:
            if comm.rank == 0:
                print(f"mpirun: {stop}: skipped", file=sys.stderr, flush=True)
    if not folders and save and Path(save).resolve() == directory.resolve():
        return None  # the first of several runs by the same command
    which = "no checkpoint is whole" if folders else "there is no checkpoint"
    raise Stop(f"--resume {directory}: {which}", 1, speaker=0)


def _whole(comm: MPI.Intracomm, folder: Path) -> Manifest:
    found = from_rank_0(comm, lambda: files.manifest(folder))

    def verify() -> None:
        for part in found.parts[comm.rank :: comm.size]:
            files.verify_part(folder, part)

    together(comm, verify)
    return found


def take(
    found: Manifest, of: Training, stages: Mapping[int, Stage], optimizer: Optimizer, beat: Callable[[], None]
) -> None:
    """Everything that this rank has of the model, from a checkpoint. `beat`: called now and then."""
    if found.facts["optimizer"] != of.recipe.name:
        used = found.facts["optimizer"]
        raise UsageError(f"--optimizer {of.recipe.name}: {found.folder} was made with {used}")
    weights, kept = (Entries(found.folder, found.files(kind)) for kind in ("weights", "optimizer"))
    states: dict[str, list[str]] = {}  # by parameter
    for name in kept.names:
        states.setdefault(name.rpartition(".")[0], []).append(name)
    for index, stage in stages.items():
        names = [entry_name(of.model, index, name) for name in stage.names]
        into = rest(of.model, stage)
        sizes = {name: size for name, (_, size) in zip(names, stage.layout, strict=True)} if stage.own else {}
        shard, by_name = shard_of(of.model, index), dict(zip(stage.names, names, strict=True))
        cuts = {by_name[name]: cut for name, cut in stage.shape.cuts.items() if name in by_name}
        values = weights.read([*into, *sizes], cuts)
        for name, target in into.items():
            value = _share(found.folder, name, values.get(name), target.shape, target.dtype, None, shard)
            with torch.no_grad():
                target.copy_(value)
        for name, size in sizes.items():
            cut = cuts.get(name)
            values[name] = _share(found.folder, name, values.get(name), size, stage.dtype, cut, shard)
        for via, part in stage.own.items():
            for target, name, piece in _of_part(stage, via, part, names):
                target.copy_(values[name] if piece is None else piece.of(values[name]))
        of_state = {state: name for name in sizes for state in states.get(name, ())}
        values = kept.read(list(of_state), {s: cuts[name] for s, name in of_state.items() if name in cuts})
        for state, name in of_state.items():
            if values[state].dim():  # a number a parameter, or one for all
                cut, size = cuts.get(name), sizes[name]
                values[state] = _share(found.folder, state, values[state], size, stage.dtype, cut, shard)
        for via, part in stage.own.items():
            restored: list[dict[str, Tensor]] = []
            for _, name, piece in _of_part(stage, via, part, names):
                of_one = {state.rpartition(".")[2]: values[state] for state in states.get(name, ())}
                pieces_of = {key: piece.of(value).clone() for key, value in of_one.items() if piece and value.dim()}
                restored.append(of_one | pieces_of)
            optimizer.restore((index, via), restored)
        beat()


def _of_part(stage: Stage, via: int, part: Tensor, names: Sequence[str]) -> list[tuple[Tensor, str, Piece | None]]:
    """Of what the optimizer has of a part: where it lies, its parameter's name, and what of that it is; None: all."""
    found = stage.in_part(via, part)
    of = [None] * len(found) if via < 0 else list(pieces(stage.layout, stage.spans[via]))
    every = names if via < 0 else [names[piece.parameter] for piece in of if piece]
    return list(zip(found, every, of, strict=True))


def _share(
    folder: Path, name: str, value: Tensor | None, size: torch.Size, dtype: torch.dtype, cut: Cut | None, shard: Shard
) -> Tensor:
    """What a shard has of an entry; `size`: of the parameter there that it is, or is of."""
    if value is None:
        raise UsageError(f"{folder}: has no {name}: is it of another model?")
    shape = tuple(size) if cut is None else cut.whole(size, shard)
    if value.shape != shape or value.dtype != dtype:
        raise UsageError(
            f"{folder}: {name} is {value.dtype} of shape {tuple(value.shape)}, "
            f"but the model's is {dtype} of shape {shape}"
        )
    return value if cut is None else cut.part(value, shard)
