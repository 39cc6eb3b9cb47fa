"""Versions of a rank's own weights, where a schedule changes them before all that use them are through.

Each lies in a place that was planned from the list: in the owner's own, or in
one of its own, with a module whose parameters are there. What a forward saves
points to its version, so nothing is copied but the weights that a STEP changes
while others still use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpirun.engine.memory_slots import Memory
from mpirun.engine.setup import Training
from mpirun.engine.stage import Stage
from mpirun.model.build_stage import build_stage
from schedgen.ir.instructions import Instruction, Op


class Versions:
    def __init__(
        self, instructions: Sequence[Instruction], stages: dict[int, Stage], memory: Memory, of: Training
    ) -> None:
        """`stages`: those at home, where version 0 is when a walk through the list begins."""
        self.home = stages
        self.by_version: dict[tuple[int, int], Stage] = {}
        self.last: dict[int, Stage] = {}  # by stage
        in_place: dict[tuple[int, int], Stage] = {}
        for i in instructions:
            if i.op == Op.STEP and i.peer >= 0:
                found, block = stages[i.stage], memory.version(i)
                if block is not None:
                    key = i.stage, memory.of[i]
                    if key not in in_place:
                        module = build_stage(of.model, i.stage, of.seed)
                        in_place[key] = found.beside(module, block)
                    found = in_place[key]
                self.by_version[i.stage, i.peer] = self.last[i.stage] = found

    def at(self, stage: int, version: int) -> Stage:
        """The stage with that version of its weights."""
        return self.by_version[stage, version] if version else self.home[stage]

    def every(self, stage: int) -> list[Stage]:
        """The stage in all its places."""
        return list({id(one): one for one in (self.home[stage], *self._of(stage))}.values())

    def _of(self, stage: int) -> list[Stage]:
        return [one for (s, _), one in self.by_version.items() if s == stage]

    def make(self, stage: int, version: int) -> Callable[[], Stage]:
        """What copies the version before to the place of `version`, unless it is the same, and returns the stage."""
        before, here = self.at(stage, version - 1), self.at(stage, version)

        def copy() -> Stage:
            if here is not before:
                here.weights.copy_(before.weights)
            return here

        return copy

    def go_home(self) -> None:
        """The last versions are the first of the next walk."""
        for stage, one in self.last.items():
            if one is not self.home[stage]:
                self.home[stage].weights.copy_(one.weights)
