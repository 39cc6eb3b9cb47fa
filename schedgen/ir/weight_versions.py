"""Versions of weights, for schedules without a flush: when weights change, and which version a job uses.

[Narayanan et al. 2019, PipeDream, section 3.3; 2021, Memory-efficient pipeline-parallel training, section 3.1: 2BW]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
