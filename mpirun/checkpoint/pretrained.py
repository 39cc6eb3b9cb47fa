"""Weights to start from: a directory of safetensors files, as transformers and `export` write it.

Out: the requested tensors by name, mapped from the files: a tensor that is never used is not read. `check_weights`
compares them with a model before they are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpirun.model.build_stage import weight_names
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
