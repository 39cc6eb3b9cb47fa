"""The entries of a stage in a checkpoint: the parameters' names in the model, which depend on no stage or rank.

Tensor slices write a parameter in shares, as entries NAME@t/T (share t of T); `Entries` reads these as the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mpirun.checkpoint.disk_format import read_entries
from mpirun.engine.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import Slice, SlicedDim
from schedgen.util.errors import UsageError

_SHARE = re.compile(r"(.+)@(\d{1,9})/(\d{1,9})(\.[^.@]+)?")


def parameter_entries(model: Model, stage: LocalStage) -> list[str | None]:
    """The entry of each of a stage's parameters; None for one that is written with another stage."""
    firsts = {key: tie[0][0] for tie in model.tied for key in tie}
    entries: list[str | None] = []
    for name in stage.names:
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries.append(slice_entry(entry, model.slice_of(stage.index)))
        else:
            entries.append(entry if firsts.get((stage.index, name), stage.index) == stage.index else None)
    return entries


def slice_entry(entry: str, slice: Slice) -> str:
    """The entry of a tensor slice's share of a parameter: NAME@t/T."""
    return f"{entry}@{slice.index}/{slice.count}"


def is_share(model: Model, stage: LocalStage, name: str) -> bool:
    """Whether a stage's tensor of this name is a tensor slice's share."""
    return model.slice_of(stage.index).count > 1 and name in stage.shape.sliced_dims


def untrained_tensors(stage: LocalStage) -> dict[str, Tensor]:
    """The frozen parameters and buffers of a stage's module by name: the tensors themselves."""
    module = stage.module
    trained = {parameter.data_ptr() for parameter in module.parameters() if parameter.requires_grad}
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    values = {name: own[name].detach() if name in own else value for name, value in module.state_dict().items()}
    return {
        name: value
        for name, value in values.items()
        if name.endswith("_extra_state") or value.data_ptr() not in trained
    }


def written_untrained(model: Model, stage: LocalStage) -> dict[str, Tensor]:
    """The untrained tensors that are written, by entry: every share, and the first slice's copy of others."""
    entries: dict[str, Tensor] = {}
    for name, value in untrained_tensors(stage).items():
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries[slice_entry(entry, model.slice_of(stage.index))] = value
        elif model.is_first_slice(stage.index):
            entries[entry] = value
    return entries


def first_stages(entries: Iterable[tuple[str, int]]) -> dict[str, int]:
    """By entry, the first of the stages that it is paired with."""
    first: dict[str, int] = {}
    for entry, stage in entries:
        first[entry] = min(stage, first.get(entry, stage))
    return first


class Entries:
    """The entries of one kind, weights or optimizer; a parameter in shares has one name here."""

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        """`files`: the file of each entry as it was written; `folder`: the checkpoint, for messages."""
        self.folder, self.files = folder, files
        self.shares: dict[str, dict[int, str]] = {}  # by name and number of the share, its entry; "": it is missing
        for entry in files:
            if (match := _SHARE.fullmatch(entry)) is not None:
                name, index, count, suffix = match.groups(default="")
                missing = dict.fromkeys(range(min(int(count), len(files))), "")
                self.shares.setdefault(name + suffix, missing)[int(index)] = entry

    @property
    def names(self) -> list[str]:
        """All names, including those of parameters in shares."""
        return [*(name for name in self.files if _SHARE.fullmatch(name) is None), *self.shares]

    def read(self, names: Sequence[str], dims: Mapping[str, SlicedDim]) -> dict[str, Any]:
        """The values of whole entries; missing ones are left out. `dims`: how entries that may be in shares were cut.

        UsageError if shares do not fit together.
        """
        values = read_entries(self.files, [name for name in names if name in self.files])
        for name in names:
            entries = list(self.shares.get(name, {}).values())
            if name not in values and entries and "" not in entries:
                shares = read_entries(self.files, entries)
                values[name] = self._joined(name, [shares[entry] for entry in entries], dims.get(name))
        return values

    def _joined(self, name: str, shares: Sequence[Any], dim: SlicedDim | None) -> Any:
        if not isinstance(shares[0], Tensor) or not shares[0].dim():  # a number that all slices have
            return shares[0]
        try:
            if dim is None:
                raise ValueError
            return dim.join(shares)
        except (ValueError, IndexError, RuntimeError):
            raise UsageError(f"{self.folder}: the shares of {name} cannot be joined as the model divides it") from None
