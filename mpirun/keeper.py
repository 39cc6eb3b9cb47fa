"""--save and --resume: what every rank writes to a checkpoint, and takes from one.

Each owner writes what it owns, under the parameters' names in the model;
of several owners of a stage one does, with all parts of it where they divide
it. Whoever needs something looks for its name: so a checkpoint made under one
schedule goes on under any other. Of a parameter that is cut every shard writes
its share; who reads it puts these together and takes a share of its own from
the whole.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun import checkpoint
from mpirun.checkpoint import Manifest
from mpirun.errors import Stop, from_rank_0, on_rank_0, together
from mpirun.guard import BEAT, PHASE, SAVING, TRAINING
from mpirun.model import Model, entry_name, is_copy, shard_of
from mpirun.optimizer import Optimizer
from mpirun.shards import Piece, pieces
from mpirun.shares import Entries, share_name
from mpirun.stage import Stage
from mpirun.tensor import Cut, Shard
from mpirun.training import Training
from schedgen.errors import UsageError
from schedgen.program import Header


class Keeper:
    """One rank's part of all checkpoints of a run."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        header: Header,
        of: Training,
        stages: Mapping[int, Stage],
        optimizer: Optimizer,
        state: memoryview,
        schedule: str,
    ) -> None:
        """`state`: what the guard sees; `schedule`: its hash."""
        self.comm, self.header, self.of, self.stages, self.optimizer = comm, header, of, stages, optimizer
        self.state = state
        self.facts: dict[str, Any] = {
            "seed": of.seed,
            "optimizer": of.recipe.name,
            "schedule": {"sha256": schedule, "scheme": dict(header.scheme)},
            "data": {
                "text": hashlib.sha256(of.text.numpy().data).hexdigest() if comm.rank == 0 else "",
                "microbatches": header.microbatches * of.walks,
            },
            "options": _options(of),
            "changed": [],
        }
        mine = [(name, s) for s, stage in stages.items() if self._has_rest(s) for name in rest(of.model, stage)]
        beside = [one for of_rank in comm.allgather(mine) for one in of_rank]
        self.first: dict[str, int] = {}  # the stage that writes what is no trained parameter
        for name, index in beside:
            self.first[name] = min(index, self.first.get(name, index))
        first = of.shapes[:: header.tensor]  # shards of each stage
        names = Counter(entry_name(of.plain, s, name) for s, shape in enumerate(first) for name in shape.names)
        names.update(list(self.first) if of.model.named else [name for name, _ in beside])
        tied = {entry_name(of.plain, *place) for tie in of.plain.tied for place in tie}
        for name, count in names.items():
            if name.endswith("_extra_state"):
                raise UsageError(f"the model has {name}: checkpoints hold parameters and buffers only")
            if count > 1 and name not in tied:
                raise UsageError(f"two layers of the model have a {name}: in checkpoints names must differ")
        self.directory: Path | None = None
        self.keep, self.last = 0, 0

    # Writing

    def save_to(self, directory: str, keep: int, resumed: str | None) -> None:
        """Where checkpoints go from now on, and how many are kept. Collective."""
        self.directory, self.keep = Path(directory), keep
        on_rank_0(self.comm, lambda: _prepare(Path(directory), resumed))
        together(self.comm, lambda: _seen(Path(directory)))
        on_rank_0(self.comm, lambda: _tidy(Path(directory)))

    def save(self, step: int) -> bool:
        """A checkpoint after so many steps; whether it came about. Collective."""
        comm, directory = self.comm, self.directory
        assert directory is not None
        self.state[PHASE] = SAVING
        begin = time.perf_counter()
        try:
            on_rank_0(comm, lambda: checkpoint.begin(directory, step))
            divided = self._gather()
            parts = comm.gather(together(comm, lambda: self._parts(directory, step, divided)))
            facts = {"step": step, **self.facts}
            written = [part for of_rank in parts or () for part in of_rank]
            on_rank_0(comm, lambda: checkpoint.publish(directory, step, facts, written))
            on_rank_0(comm, lambda: checkpoint.prune(directory, step, self.keep))
        except Stop as stop:
            if comm.rank == 0:
                checkpoint.abandon(directory, step)
                last = f"the last one is that of step {self.last}" if self.last else "there is none"
                print(f"mpirun: no checkpoint of step {step}: {stop}; {last}", file=sys.stderr, flush=True)
            return False
        finally:
            self.state[PHASE] = TRAINING
        self.last = step
        if comm.rank == 0:
            where = checkpoint.folder_of(directory, step)
            print(f"checkpoint of step {step}: {where}, {time.perf_counter() - begin:.1f} s", flush=True)
        return True

    def _writes(self, stage: int) -> bool:
        """Of a stage's owners, one does."""
        owners = self.header.owners[stage]
        return owners[stage % len(owners)] == self.comm.rank

    def _gather(self) -> dict[int, list[dict[str, Tensor]]]:
        """By divided stage that this rank writes, of every parameter "" and what the optimizer keeps. Collective."""
        found: dict[int, list[dict[str, Tensor]]] = {}
        for index, shape in enumerate(self.of.shapes):
            if self.header.parts(index) == (-1,):
                continue
            owners = self.header.owners[index]
            mine: list[list[tuple[int, dict[str, Tensor]]]] = [[] for _ in shape.names]
            if index in self.stages:
                stage = self.stages[index]
                for via, part in stage.own.items():
                    kept = self.optimizer.kept((index, via))
                    for place, piece in enumerate(pieces(stage.layout, stage.spans[via])):
                        values = {"": piece.within(part), **(kept[place] if kept else {})}
                        cloned = {key: value.detach().to("cpu", copy=True) for key, value in values.items()}
                        mine[piece.parameter].append((piece.begin, cloned))
            for of_one, (_, size) in zip(mine, shape.layout, strict=True):
                every = self.comm.gather(of_one, root=owners[index % len(owners)])
                if every is not None:
                    found.setdefault(index, []).append(_whole_of([one for ones in every for one in ones], size))
                self.state[BEAT] += 1
        return found

    def _has_rest(self, stage: int) -> bool:
        """What is no trained parameter is the same in all shards: the first writes it."""
        return self._writes(stage) and stage % self.header.tensor == 0

    def _parts(
        self, directory: Path, step: int, divided: Mapping[int, list[dict[str, Tensor]]]
    ) -> list[checkpoint.Part]:
        """`divided`: what `_gather` gave."""
        entries: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
        for index, stage in self.stages.items():
            if self._writes(index) and not is_copy(self.of.model, index):
                mine = own_names(self.of.model, stage)
                kept = divided.get(index) or self.optimizer.kept((index, -1))
                views = [one[""] for one in divided[index]] if index in divided else stage.views(stage.weights)
                entries["weights"] |= {name: view.detach() for name, view in zip(mine, views, strict=True) if name}
                # The format takes no tensors that share memory, nor views of them.
                entries["weights"] |= {
                    name: value.detach().clone(memory_format=torch.contiguous_format)
                    for name, value in (rest(self.of.model, stage) if self._has_rest(index) else {}).items()
                    if self.first[name] == index
                }
                entries["optimizer"] |= {
                    f"{name}.{key}": value
                    for name, of_one in zip(mine, kept, strict=True)
                    if name
                    for key, value in of_one.items()
                    if key
                }
        parts = []
        for kind, found in entries.items():
            if found:
                parts.append(checkpoint.write_part(directory, step, kind, self.comm.rank, found))
                self.state[BEAT] += 1
        return parts

    # Reading

    def take(self, found: Manifest) -> None:
        """Everything that this rank has of the model, from a checkpoint. Collective."""
        together(self.comm, lambda: self._take(found))
        self.last = found.step
        if self.comm.rank == 0:
            print(f"resumed after step {found.step}: {found.folder}", flush=True)
            others = self.others(found)
            for what in others:
                print(f"mpirun: note: the checkpoint was made with {what}", file=sys.stderr, flush=True)
            self.facts["changed"] = [*found.facts["changed"], *others]

    def others(self, found: Manifest) -> list[str]:
        """What a checkpoint was made with that is another here, in words. On rank 0."""
        before, here = found.facts["data"], self.facts["data"]
        counts = f"{before['microbatches']} microbatches a step, not {here['microbatches']}"
        differs = {
            f"seed {found.facts['seed']}, not {self.of.seed}": found.facts["seed"] != self.of.seed,
            "another text": before["text"] != here["text"],
            counts: before["microbatches"] != here["microbatches"],
        }
        given, now = found.facts["options"], self.facts["options"]
        differs |= {
            f"{_said(name, given.get(name))}, not {_said(name, now.get(name))}": given.get(name) != now.get(name)
            for name in {**given, **now}
        }
        return [words for words, wrong in differs.items() if wrong]

    def _take(self, found: Manifest) -> None:
        if found.facts["optimizer"] != self.facts["optimizer"]:
            used = found.facts["optimizer"]
            raise UsageError(f"--optimizer {self.facts['optimizer']}: {found.folder} was made with {used}")
        weights, kept = (Entries(found.folder, found.files(kind)) for kind in ("weights", "optimizer"))
        states: dict[str, list[str]] = {}  # by parameter
        for name in kept.names:
            states.setdefault(name.rpartition(".")[0], []).append(name)
        for index, stage in self.stages.items():
            names = [entry_name(self.of.model, index, name) for name in stage.names]
            into = rest(self.of.model, stage)
            sizes = {name: size for name, (_, size) in zip(names, stage.layout, strict=True)} if stage.own else {}
            shard, by_name = shard_of(self.of.model, index), dict(zip(stage.names, names, strict=True))
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
                self.optimizer.restore((index, via), restored)
            self.state[BEAT] += 1


def _options(of: Training) -> dict[str, Any]:
    """What a step depends on besides, by option; what is not given is not there."""
    recipe = of.recipe
    given = {"--lr": recipe.lr, "--weight-decay": recipe.weight_decay, "--lr-schedule": recipe.schedule}
    given |= {"--clip": recipe.clip, "--autocast": "bf16" if of.mixed else None}
    given |= {"--momentum": recipe.momentum or None, "--warmup": recipe.warmup or None}
    if recipe.schedule != "constant":
        given["--steps"] = recipe.steps
    return {name: value for name, value in given.items() if value is not None}


def _said(name: str, value: object) -> str:
    return f"no {name}" if value is None else f"{name} {value}"


def _of_part(stage: Stage, via: int, part: Tensor, names: Sequence[str]) -> list[tuple[Tensor, str, Piece | None]]:
    """Of what the optimizer has of a part: where it lies, its parameter's name, and what of that it is; None: all."""
    found = stage.in_part(via, part)
    of = [None] * len(found) if via < 0 else list(pieces(stage.layout, stage.spans[via]))
    every = names if via < 0 else [names[piece.parameter] for piece in of if piece]
    return list(zip(found, every, of, strict=True))


def _whole_of(found: Sequence[tuple[int, dict[str, Tensor]]], size: torch.Size) -> dict[str, Tensor]:
    """A parameter, and what is kept of it, from its pieces; each with the element at which it begins."""
    ordered = [values for _, values in sorted(found, key=lambda one: one[0])]
    if not ordered:
        return {"": torch.zeros(size)}
    return {
        key: torch.cat([values[key] for values in ordered]).view(size) if one.dim() else one
        for key, one in ordered[0].items()
    }


def newest(comm: MPI.Intracomm, options: argparse.Namespace) -> Manifest | None:
    """The newest whole checkpoint in --resume; None where there is none at all and --save is the same. Collective."""
    directory = Path(options.resume)
    folders = from_rank_0(comm, lambda: checkpoint.folders(directory))
    for folder in folders:
        try:
            return _whole(comm, folder)
        except Stop as stop:
            if comm.rank == 0:
                print(f"mpirun: {stop}: skipped", file=sys.stderr, flush=True)
    if not folders and options.save and Path(options.save).resolve() == directory.resolve():
        return None  # the first of several runs by the same command
    which = "no checkpoint is whole" if folders else "there is no checkpoint"
    raise Stop(f"--resume {directory}: {which}", 1, speaker=0)


def _whole(comm: MPI.Intracomm, folder: Path) -> Manifest:
    found = from_rank_0(comm, lambda: checkpoint.manifest(folder))

    def verify() -> None:
        for part in found.parts[comm.rank :: comm.size]:
            checkpoint.verify_part(folder, part)

    together(comm, verify)
    return found


def own_names(model: Model, stage: Stage) -> list[str | None]:
    """The entries of a stage's parameters; None for one that is written with another stage."""
    firsts = {place: tie[0][0] for tie in model.tied for place in tie}
    shard = shard_of(model, stage.index)
    found: list[str | None] = []
    for name in stage.names:
        entry = entry_name(model, stage.index, name)
        if shard.count > 1 and name in stage.shape.cuts:
            found.append(share_name(entry, shard))
        else:
            found.append(entry if firsts.get((stage.index, name), stage.index) == stage.index else None)
    return found


def rest(model: Model, stage: Stage) -> dict[str, Tensor]:
    """What a stage's module has beside trained parameters: frozen ones and buffers."""
    trained = {parameter.data_ptr() for parameter in stage.module.parameters() if parameter.requires_grad}
    return {
        entry_name(model, stage.index, name): value
        for name, value in stage.module.state_dict().items()
        if name.endswith("_extra_state") or value.data_ptr() not in trained
    }


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


def _prepare(directory: Path, resumed: str | None) -> None:
    """A folder to save to, which has no checkpoints of another run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".seen"
        probe.write_bytes(b"")
    except OSError as error:
        raise UsageError(f"--save {directory}: {error.strerror}") from None
    if (directory / checkpoint.MANIFEST).exists():
        raise UsageError(f"--save {directory}: it is a checkpoint itself: save to another folder")
    if checkpoint.folders(directory) and (resumed is None or Path(resumed).resolve() != directory.resolve()):
        raise UsageError(f"--save {directory}: it has checkpoints already: go on with --resume {directory}")


def _seen(directory: Path) -> None:
    if not (directory / ".seen").exists():
        raise UsageError(f"--save {directory}: not all hosts see the same folder")


def _tidy(directory: Path) -> None:
    (directory / ".seen").unlink(missing_ok=True)
    checkpoint.tidy(directory)
