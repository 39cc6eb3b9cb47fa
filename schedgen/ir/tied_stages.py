"""Tied stages: stages that share parameters, each with its own copy, whose gradients are summed before the step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TiedStages:
    """The ties of a schedule; tie k is called t.k in its ALLREDUCE."""

    stages: tuple[tuple[int, ...], ...]  # of each tie, two or more, ascending
    owners: tuple[tuple[int, ...], ...]  # by stage

    def __bool__(self) -> bool:
        """Whether any stages are tied."""
        return bool(self.stages)

    def __len__(self) -> int:
        """How many ties there are."""
        return len(self.stages)

    def sharers(self, tie: int) -> tuple[int, ...]:
        """The owners of the stages of a tie, ascending: who enters its ALLREDUCE."""
        return tuple(sorted({rank for stage in self.stages[tie] for rank in self.owners[stage]}))
