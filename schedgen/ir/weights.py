"""Weight shards, each with an owner of its own [ZeRO, FSDP]; and versions of weights, for schedules without a flush.

Versions: when weights change, and which version a job uses [Narayanan et al. 2019, PipeDream, section 3.3; 2021,
Memory-efficient pipeline-parallel training, section 3.1: 2BW].

A *unit* of weights has one dw, one STEP and one set of owners: it is an undivided stage or one shard of a divided
stage. Units are numbered by stage and then by shard. Gradients may also be cut into parts where weights are not, so
that several owners sum them part by part: then each part is a unit of gradients, but the stage one unit of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schedgen.util.arrays import Flags, Numbers

LINE = 64  # bytes: shards of weights, and slices of a sum, begin at multiples of it


def shard_offsets(size: int, shards: int) -> list[int]:
    """The offsets in bytes where the shards begin, and the end; non-empty shards but the last are equally long.

    Non-empty shards begin at multiples of 64 bytes.
    """
    shard = -(-size // (shards * LINE)) * LINE
    return [min(k * shard, size) for k in range(shards + 1)]


@dataclass(frozen=True)
class WeightShards:
    """The units of a schedule, of weights or of gradients, and who owns each; true if a stage is divided."""

    shard_owners: tuple[tuple[int, ...], ...]  # by stage, the owner of each shard; empty: no stage is divided
    owners: tuple[tuple[int, ...], ...]  # by stage
    parts: tuple[int, ...] = ()  # of gradients: by stage, how many parts its owners sum; empty: as weights are divided

    def __bool__(self) -> bool:
        """Whether some stage is divided."""
        return bool(self.shard_owners or self.parts)

    @cached_property
    def counts(self) -> Numbers:
        """How many units each stage has."""
        shards = [len(ranks) for ranks in self.shard_owners]
        return np.array(self.parts or shards or [1] * len(self.owners), np.int64)

    def of(self, stage: int) -> tuple[int, ...]:
        """The `shard` operands of a stage's units: (-1,) where it is not divided."""
        count = int(self.counts[stage])
        return tuple(range(count)) if count > 1 else (-1,)

    @cached_property
    def first_unit(self) -> Numbers:
        """The units of stage s are first_unit[s] to first_unit[s + 1] - 1."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def stage_of(self) -> Numbers:
        """The stage of each unit."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """(stage, shard) of every unit."""
        return [(stage, shard) for stage in range(len(self.counts)) for shard in self.of(stage)]

    def holders(self, stage: int, shard: int) -> tuple[int, ...]:
        """The owners of a unit, ascending."""
        return self.owners[stage] if shard < 0 or self.parts else (self.shard_owners[stage][shard],)

    def is_owner(self, workers: int) -> Flags:
        """Whether a rank owns a unit, shape (workers, units)."""
        owner = np.zeros((workers, len(self.units)), bool)
        for unit, (stage, shard) in enumerate(self.units):
            owner[list(self.holders(stage, shard)), unit] = True
        return owner

    def sizes(self, by_stage: Numbers) -> Numbers:
        """Bytes of every unit; `by_stage`: bytes of all weights of each stage."""
        if not self:
            return by_stage
        ends = [shard_offsets(int(size), int(count)) for size, count in zip(by_stage, self.counts, strict=True)]
        return np.concatenate([np.diff(np.array(offsets, np.int64)) for offsets in ends])


FLUSH, STASH, VERTICAL, TWO_BUFFERS = "flush", "stash", "vertical", "2bw"

# When weights change, and which of their versions a job uses.
UPDATES = {
    FLUSH: "once a step, after all microbatches: there is one version",
    STASH: "after every microbatch's backward; a forward uses the newest version, its backward the same one",
    VERTICAL: "as stash, but all stages use the version that was newest when the microbatch entered the first stage",
    TWO_BUFFERS: "after every m microbatches; all stages use the version that the update before the last one made",
}


@dataclass(frozen=True)
class WeightVersions:
    """When the weights of a schedule change; true if they have versions."""

    updates: str  # one of UPDATES
    microbatches: int
    owners: tuple[tuple[int, ...], ...]  # by stage
    accumulated: int = 0  # microbatches of an update with two buffers: the paper's m

    def __bool__(self) -> bool:
        """Whether weights have versions: they change more than once a list."""
        return self.updates != FLUSH

    @property
    def count(self) -> int:
        """The exclusive upper bound of versions; 1 if weights have none."""
        return self.microbatches + 1 if self else 1

    def round(self, stage: int) -> int:
        """The number of microbatches in one update of a stage: one for each of its owners, or m with two buffers."""
        return self.accumulated or len(self.owners[stage])

    @property
    def rounds(self) -> list[int]:
        """`round` of every stage."""
        return [self.round(stage) for stage in range(len(self.owners))]

    def delayed(self, microbatch: Any) -> Any:
        """With two buffers, the version that a microbatch uses (or each of an array): max(b div m - 1, 0)."""
        return np.maximum(microbatch // self.accumulated - 1, 0)
