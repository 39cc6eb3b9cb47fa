"""Tensor parallelism: T slices of every stage of the model, on as many workers [Megatron-LM, section 3].

Stage s T + t of a schedule is slice t of the model's stage s. The jobs of a *sliced* stage's slices give
the terms of a sum, which an ALLREDUCE adds up. A *replicated* stage is computed alike by all its slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedgen.util.arrays import Flags, Ints
from schedgen.util.errors import UsageError


@dataclass(frozen=True)
class TensorParallel:
    """The number of slices of every stage of the model, and its replicated stages; true if stages have slices."""

    degree: int  # T, the slices of each stage; 1: stages have none
    replicated: tuple[int, ...]  # the model's stages that all slices compute alike, ascending
    stages: int  # of the schedule

    def __bool__(self) -> bool:
        """Whether stages have slices."""
        return self.degree > 1

    @cached_property
    def sliced(self) -> Flags:
        """By stage of the schedule: whether its output, and the gradients it gives, add up over its slices."""
        sliced = np.full(self.stages // self.degree, self.degree > 1)
        sliced[list(self.replicated)] = False
        return np.repeat(sliced, self.degree)

    def slices_of(self, stage: int) -> range:
        """The slices of the model's stage that `stage` is one of: stages of the schedule, in their order."""
        first = stage - stage % self.degree
        return range(first, first + self.degree)

    def summed_stages(self, stage: int) -> range:
        """The stages whose jobs add up to x.s and to the gradients of s's inputs: all slices if s is sliced, else s."""
        return self.slices_of(stage) if self.sliced[stage] else range(stage, stage + 1)


def check_slices_apart(compute: Ints, degree: int, directions: Sequence[str]) -> None:
    """UsageError where two slices of a stage are on one worker; `compute`: (directions, stages, microbatches)."""
    placed = np.sort(compute.reshape(len(compute), -1, degree, compute.shape[2]), axis=2)
    for d, s, t, b in np.argwhere(placed[:, :, 1:] == placed[:, :, :-1])[:1].tolist():
        raise UsageError(
            f"w puts two slices of {directions[d]}({s}, {b}) on worker {placed[d, s, t, b]}: "
            f"the {degree} slices of a stage need {degree} workers"
        )
