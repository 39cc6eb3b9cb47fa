"""--save and --resume: a run's checkpoints, and what every rank writes to one.

Each owner writes what it owns, under the parameters' names in the model;
of several owners of a stage one does, with all parts of it where they divide
it. Of a parameter that is cut every shard writes its share.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint import files
from mpirun.checkpoint.facts import facts, others
from mpirun.checkpoint.files import Manifest
from mpirun.checkpoint.names import own_names, rest
from mpirun.checkpoint.resume import take
from mpirun.comm.fail_together import Stop, on_rank_0, together
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.setup import Training
from mpirun.engine.stage import Stage
from mpirun.engine.weight_shards import pieces
from mpirun.model.contract import entry_name, is_copy
from mpirun.watchdog import BEAT, PHASE, SAVING, TRAINING
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


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
        self.facts = facts(header, of, schedule, comm.rank)
        mine = [(name, s) for s, stage in stages.items() if self._has_rest(s) for name in rest(of.model, stage)]
        beside = [one for of_rank in comm.allgather(mine) for one in of_rank]
        self.first: dict[str, int] = {}  # the stage that writes what is no trained parameter
        for name, index in beside:
            self.first[name] = min(index, self.first.get(name, index))
        first = of.shapes[:: header.tensor_parallel.degree]  # shards of each stage
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
            on_rank_0(comm, lambda: files.begin(directory, step))
            divided = self._gather()
            parts = comm.gather(together(comm, lambda: self._parts(directory, step, divided)))
            record = {"step": step, **self.facts}
            written = [part for of_rank in parts or () for part in of_rank]
            on_rank_0(comm, lambda: files.publish(directory, step, record, written))
            on_rank_0(comm, lambda: files.prune(directory, step, self.keep))
        except Stop as stop:
            if comm.rank == 0:
                files.abandon(directory, step)
                last = f"the last one is that of step {self.last}" if self.last else "there is none"
                print(f"mpirun: no checkpoint of step {step}: {stop}; {last}", file=sys.stderr, flush=True)
            return False
        finally:
            self.state[PHASE] = TRAINING
        self.last = step
        if comm.rank == 0:
            where = files.folder_of(directory, step)
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
            if self.header.weight_shards.parts(index) == (-1,):
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
                self._beat()
        return found

    def _has_rest(self, stage: int) -> bool:
        """What is no trained parameter is the same in all shards: the first writes it."""
        return self._writes(stage) and stage % self.header.tensor_parallel.degree == 0

    def _parts(self, directory: Path, step: int, divided: Mapping[int, list[dict[str, Tensor]]]) -> list[files.Part]:
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
                parts.append(files.write_part(directory, step, kind, self.comm.rank, found))
                self._beat()
        return parts

    def _beat(self) -> None:
        self.state[BEAT] += 1

    # Reading

    def take(self, found: Manifest) -> None:
        """Everything that this rank has of the model, from a checkpoint. Collective."""
        together(self.comm, lambda: take(found, self.of, self.stages, self.optimizer, self._beat))
        self.last = found.step
        if self.comm.rank == 0:
            print(f"resumed after step {found.step}: {found.folder}", flush=True)
            different = others(found.facts, self.facts)
            for what in different:
                print(f"mpirun: note: the checkpoint was made with {what}", file=sys.stderr, flush=True)
            self.facts["changed"] = [*found.facts["changed"], *different]


def _whole_of(found: Sequence[tuple[int, dict[str, Tensor]]], size: torch.Size) -> dict[str, Tensor]:
    """A parameter, and what is kept of it, from its pieces; each with the element at which it begins."""
    ordered = [values for _, values in sorted(found, key=lambda one: one[0])]
    if not ordered:
        return {"": torch.zeros(size)}
    return {
        key: torch.cat([values[key] for values in ordered]).view(size) if one.dim() else one
        for key, one in ordered[0].items()
    }


def _prepare(directory: Path, resumed: str | None) -> None:
    """A folder to save to, which has no checkpoints of another run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".seen"
        probe.write_bytes(b"")
    except OSError as error:
        raise UsageError(f"--save {directory}: {error.strerror}") from None
    if (directory / files.MANIFEST).exists():
        raise UsageError(f"--save {directory}: it is a checkpoint itself: save to another folder")
    if files.folders(directory) and (resumed is None or Path(resumed).resolve() != directory.resolve()):
        raise UsageError(f"--save {directory}: it has checkpoints already: go on with --resume {directory}")


def _seen(directory: Path) -> None:
    if not (directory / ".seen").exists():
        raise UsageError(f"--save {directory}: not all hosts see the same folder")


def _tidy(directory: Path) -> None:
    (directory / ".seen").unlink(missing_ok=True)
    files.tidy(directory)
