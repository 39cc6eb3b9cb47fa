"""Parameters in a checkpoint as their shards wrote them, NAME@t/T for share t of T, and as others read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mpirun.checkpoint import files
from mpirun.model.parallel_layers import Cut, Shard
from schedgen.util.errors import UsageError

_SHARE = re.compile(r"(.+)@(\d{1,9})/(\d{1,9})(\.[^.@]+)?")


def share_name(name: str, shard: Shard) -> str:
    """The entry of a shard's share of a parameter."""
    return f"{name}@{shard.index}/{shard.count}"


class Entries:
    """Those of one kind, by the names that they have where nothing is cut."""

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self.folder, self.files = folder, files
        self.shares: dict[str, dict[int, str]] = {}  # by name and place
        for entry in files:
            if (found := _SHARE.fullmatch(entry)) is not None:
                name, t, count, more = found.groups(default="")
                self.shares.setdefault(name + more, dict.fromkeys(range(min(int(count), len(files))), ""))[int(t)] = (
                    entry
                )

    @property
    def names(self) -> list[str]:
        return [*(name for name in self.files if _SHARE.fullmatch(name) is None), *self.shares]

    def read(self, names: Sequence[str], cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
        """Whole entries; those that are not there are left out. `cuts`: of the names that may be cut."""
        here = [name for name in names if name in self.files]
        values = files.read(self.files, here)
        for name in names:
            entries = list(self.shares.get(name, {}).values())
            if name in values or not entries or "" in entries:
                continue
            parts = files.read(self.files, entries)
            values[name] = self._joined(name, [parts[entry] for entry in entries], cuts.get(name))
        return values

    def _joined(self, name: str, parts: Sequence[Tensor], cut: Cut | None) -> Tensor:
        if not parts[0].dim():  # a number that all shards have
            return parts[0]
        try:
            if cut is None:
                raise ValueError
            return cut.join(parts)
        except (ValueError, IndexError, RuntimeError):
            raise UsageError(f"{self.folder}: {name} is in shares that do not fit the model's") from None
