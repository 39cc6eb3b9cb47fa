"""Reads parameters that tensor shards wrote in shares, as entries NAME@t/T (share t of T), as whole parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mpirun.checkpoint.disk_format import read_entries
from mpirun.model.parallel_layers import ShardedDim
from schedgen.util.errors import UsageError

_SHARE = re.compile(r"(.+)@(\d{1,9})/(\d{1,9})(\.[^.@]+)?")


class Entries:
    """The entries of one kind, weights or optimizer, by the names that they have without shares."""

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

    def read(self, names: Sequence[str], dims: Mapping[str, ShardedDim]) -> dict[str, Any]:
        """Whole entries, without those that are missing; `dims`: how those that may be in shares were cut.

        UsageError if shares do not fit together.
        """
        values = read_entries(self.files, [name for name in names if name in self.files])
        for name in names:
            entries = list(self.shares.get(name, {}).values())
            if name not in values and entries and "" not in entries:
                shares = read_entries(self.files, entries)
                values[name] = self._joined(name, [shares[entry] for entry in entries], dims.get(name))
        return values

    def _joined(self, name: str, shares: Sequence[Any], dim: ShardedDim | None) -> Any:
        if not isinstance(shares[0], Tensor) or not shares[0].dim():  # a number that all shards have
            return shares[0]
        try:
            if dim is None:
                raise ValueError
            return dim.join(shares)
        except (ValueError, IndexError, RuntimeError):
            raise UsageError(f"{self.folder}: {name} is in shares that do not fit the model's") from None
