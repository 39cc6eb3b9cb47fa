"""Versions of weights: where weights change without a flush, which of them a job uses [PipeDream, section 3.3]."""

from __future__ import annotations

from dataclasses import dataclass

FLUSH, STASH, VERTICAL = "flush", "stash", "vertical"

# When weights change, and which of their versions a job uses.
UPDATES = {
    FLUSH: "once a list, when all microbatches are through: there is one version",
    STASH: "behind every microbatch's backward; a forward uses the newest version there is, its backward the same",
    VERTICAL: "as stash, but all stages use the version that was the newest when the microbatch entered the first",
}


@dataclass(frozen=True)
class WeightVersions:
    """When the weights of a schedule change; true where they have versions."""

    updates: str  # one of UPDATES
    microbatches: int
    owners: tuple[tuple[int, ...], ...]  # by stage

    def __bool__(self) -> bool:
        """Whether weights have versions: they change behind every backward, not once a list."""
        return self.updates != FLUSH

    @property
    def count(self) -> int:
        """The number that every version is below; 0 where weights have none."""
        return self.microbatches + 1 if self else 0

    def round(self, stage: int) -> int:
        """Microbatches that make one update of a stage: one for each of its owners."""
        return len(self.owners[stage])

    @property
    def rounds(self) -> list[int]:
        """`round` of every stage."""
        return [len(ranks) for ranks in self.owners]
