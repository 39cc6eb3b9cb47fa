"""Weights under the model's own names: a directory of safetensors files, as transformers' `from_pretrained` loads it.

    DIR/model.safetensors                 where one rank writes all, or else
        model-00001-of-00003.safetensors  one for every rank that has something to write
        model.safetensors.index.json      the file of each tensor
        config.json, tokenizer.json ...   the other files of the directory whose weights training started from

To start from them, `Pretrained` gives the requested tensors by name, mapped from the files: a tensor that is never used
is not read. `check_weights` compares them with a model before they are read. `export` writes such a directory, which
appears whole or not at all: ranks write to a draft, a folder of another name, which is then renamed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpirun.checkpoint.disk_format import refusing, save_tensors, sync
from mpirun.checkpoint.gather import known_names, written_entries
from mpirun.comm.fail_together import Stop, on_rank_0, together
from mpirun.comm.output import note
from mpirun.engine.setup import RankPart
from mpirun.model.build_stage import unused_names, weight_names
from mpirun.model.contract import Model
from mpirun.model.stage_copies import fake_mode, stage_without_values
from schedgen.util.errors import UsageError, listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Pretrained:
    """Weights in a directory: model.safetensors, or files with an index, or any files that end in .safetensors.

    Called with names, it returns those tensors that exist. They lie in memory that is mapped from the files, which
    must not change while a tensor is alive; what is written to a tensor stays in this process.
    """

    def __init__(self, directory: str | Path) -> None:
        """UsageError if there are no weights. Reads no tensor."""
        self.directory = Path(directory)
        self._files = self._listed()  # by name of a tensor

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.keys()

    def __str__(self) -> str:
        """For messages."""
        return f"weights in {self.directory}"

    def __call__(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors on the CPU by name; names that no file has are left out. UsageError if a file is damaged."""
        values = {}
        for name in names:
            if name in self._files:
                # Each has its own mapping, which ends with the tensor: mapped pages count as this process's memory.
                try:
                    with safe_open(self._files[name], framework="pt") as file:
                        values[name] = file.get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise UsageError(f"{self._files[name]}: {error}") from None
        return values

    def _listed(self) -> dict[str, Path]:
        if not self.directory.is_dir():
            raise UsageError(f"weights: {self.directory} is no directory")
        if (self.directory / SINGLE).exists():
            return dict.fromkeys(_names(self.directory / SINGLE), self.directory / SINGLE)
        if (self.directory / INDEX).exists():
            return self._of_index(self.directory / INDEX)
        files = {name: path for path in sorted(self.directory.glob("*.safetensors")) for name in _names(path)}
        if not files:
            raise UsageError(f"weights: {self.directory} has no .safetensors file")
        return files

    def _of_index(self, path: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(path.read_bytes())["weight_map"]
            return {str(name): self.directory / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"weights: {path} is damaged") from None


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"weights: {path}: {error}") from None


def check_weights(model: Model) -> list[str]:
    """Sentences on entries of `Model.weights` that no stage uses, and on tensors that it lacks.

    UsageError if no entry belongs to the model. Weights without `names` are not compared.
    """
    if model.weights is None or (names := getattr(model.weights, "names", None)) is None:
        return []
    missing: list[str] = []
    unused, fake = dict.fromkeys(names), fake_mode()
    for stage in range(len(model.stages)):
        with stage_without_values(model, stage, fake) as module:
            known = weight_names(model, stage, module)
        for candidates in known.values():
            if not any(candidate in names for candidate in candidates):
                missing.append(candidates[0])
            for candidate in candidates:
                unused.pop(candidate, None)
    where = f"{model.weights}"
    if unused.keys() == {*names}:
        raise UsageError(f"{where}: has nothing of the model: it has {listed(unused)}, but not {listed(missing)}")
    trained = "trained from the values that the model is built with"
    lack = [f"{where}: has no {listed(missing)}: {trained}"] if missing else []
    return lack + ([f"{where}: no stage uses {listed(unused)}"] if unused else [])


WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


def export(part: RankPart, directory: str | Path, source: str | Path | None = None) -> None:
    """Write all parameters and saved buffers to a new or empty directory. Collective.

    `source`: a directory whose files, except weights, are copied. Stop if the directory is not empty or cannot be
    written.
    """
    comm = part.comm
    directory = Path(comm.bcast(os.path.realpath(directory)))
    draft = directory.with_name(f".exporting-{comm.bcast(secrets.token_hex(8))}")  # another run has another
    on_rank_0(comm, lambda: _begin(directory, draft, source))
    try:
        entries = _entries(part)
        names = comm.allgather(list(entries))
        writers = [rank for rank, of_rank in enumerate(names) if of_rank]
        several = {rank: f"model-{k + 1:05d}-of-{len(writers):05d}.safetensors" for k, rank in enumerate(writers)}
        files = several if len(writers) > 1 else dict.fromkeys(writers, SINGLE)
        sizes = comm.gather(together(comm, lambda: _write(draft, files.get(comm.rank), entries)))
        index = {name: files[rank] for rank, of_rank in enumerate(names) for name in of_rank}
        on_rank_0(comm, lambda: _publish(directory, draft, source, index, sum(sizes or ())))
    except Stop:
        if comm.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def whole_state(part: RankPart) -> dict[str, Tensor]:
    """On rank 0, copies of all that `export` writes, under every name that the model has for it; elsewhere none.

    Collective.
    """
    entries = _entries(part)
    copies = {name: value.detach().to("cpu", copy=True) for name, value in entries.items()}
    names = known_names(part.setup.model, part.stages)
    whole: dict[str, Tensor] = {}
    aliases: list[list[str]] = []
    for of_rank, names_of_rank in part.comm.gather((copies, names)) or ():
        whole |= of_rank
        aliases += names_of_rank
    return {alias: whole[known[0]] for known in aliases if known[0] in whole for alias in known} | whole


def _entries(part: RankPart) -> dict[str, Tensor]:
    """The tensors that this rank writes, by name in the whole model. Collective."""
    comm = part.comm
    entries, _ = written_entries(part, lambda _: ())
    unused = on_rank_0(comm, lambda: _unused(part.setup.model)) or {}
    if without := [entry for entry, value in unused.items() if value.is_meta]:
        why = "the forward does not use them, and on the meta device they have no values"
        note(comm, f"not written: {listed(without)}: {why}")
    return entries | {entry: x for entry, x in unused.items() if not x.is_meta}


def _unused(model: Model) -> dict[str, Tensor]:
    """By entry, what is in no stage: as `Model.weights` has it or, if it lacks it, as the module has it."""
    names = unused_names(model)
    given = model.weights([name for known in names.values() for name in known]) if model.weights and names else {}
    found: dict[str, Tensor] = {}
    for name, known in names.items():
        tensor = model.origin.unused[name]
        values = [given[other] for other in known if other in given and given[other].shape == tensor.shape]
        found[known[0]] = values[0].to(tensor.dtype) if values else tensor
    return found


def _write(draft: Path, file: str | None, entries: Mapping[str, Tensor]) -> int:
    """Write this rank's file, if it has one; returns the bytes of its tensors."""
    if file is None:
        return 0
    # The format takes no views, nor tensors that share memory.
    values = {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in entries.items()
    }
    save_tensors(values, draft / file, {"format": "pt"})
    return sum(value.nbytes for value in values.values())


def check_new(directory: Path) -> None:
    """UsageError or RefusedFile if a directory cannot be exported to: it is not empty, or cannot be made."""
    real = Path(os.path.realpath(directory))  # of a link the directory that it points to
    with refusing(directory):
        real.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(real) and (not real.is_dir() or any(real.iterdir())):
            raise UsageError(f"export {directory}: it is not empty: export to a new directory")
        if not os.access(real.parent, os.W_OK | os.X_OK):
            raise UsageError(f"export {directory}: {real.parent}: Permission denied")


def _begin(directory: Path, draft: Path, source: str | Path | None) -> None:
    if source is not None and not Path(source).is_dir():
        raise UsageError(f"export: {source} is no directory")
    check_new(directory)
    with refusing(directory):
        draft.mkdir()


def _publish(directory: Path, draft: Path, source: str | Path | None, index: Mapping[str, str], size: int) -> None:
    with refusing(directory):
        if len(set(index.values())) > 1:
            weight_map = dict(sorted(index.items()))
            contents = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (draft / INDEX).write_text(json.dumps(contents, indent=2) + "\n")
        for path in sorted(Path(source).iterdir()) if source is not None else ():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
                shutil.copyfile(path, draft / path.name)
        for path in (*draft.iterdir(), draft):
            sync(path)
        if directory.exists():
            directory.rmdir()
        draft.rename(directory)
        sync(directory.parent)
