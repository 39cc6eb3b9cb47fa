"""Weight versions: a STEP that makes a new version of a stage's weights while jobs still use older ones.

1. Version 0 is the owner's weights when a pass through the list begins. STEP to version v makes v from v - 1.
2. If jobs still use v - 1, v has a memory slot of its own (`memory_slots`): the STEP copies v - 1 there and steps the
   copy. Otherwise both have one slot, and the STEP changes it in place.
3. Every slot has parameters that lie there, which the module gets before each job. The graph that a forward saves
   points to the slot of its version, so its backward uses the same version.
4. At NORM the last version is copied to where the next pass expects version 0.
5. NORM sees the gradients of the last update only. It learns from `unsound` if those of an earlier one are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpirun.engine.core.context import Act, Context
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.grad_norm import norms_on_device
from mpirun.engine.memory_slots import MemorySlots
from schedgen.ir.instructions import Instruction, Op


class StageVersions:
    """The versions of the stages that a rank owns, each with parameters that lie in its memory."""

    def __init__(
        self, instructions: Sequence[Instruction], stages: Mapping[int, LocalStage], slots: MemorySlots
    ) -> None:
        self.version_0 = stages
        self.by_version: dict[tuple[int, int], LocalStage] = {}
        self.last: dict[int, LocalStage] = {}  # by stage
        self.unsound: dict[int, Tensor] = {}  # by stage and parameter: 0, or NaN after an update that is not finite
        in_slot: dict[tuple[int, int], LocalStage] = {}
        for i in instructions:
            if i.op == Op.STEP and i.version >= 0:
                stage, memory = stages[i.stage], slots.version(i)
                if memory is not None:
                    key = i.stage, slots.number[i]
                    if key not in in_slot:
                        in_slot[key] = stage.version(memory)
                    stage = in_slot[key]
                self.by_version[i.stage, i.version] = self.last[i.stage] = stage
                self.unsound[i.stage] = torch.zeros(len(stage.names), device=stage.device.torch)

    def at(self, stage: int, version: int) -> LocalStage:
        """The stage with that version of its weights."""
        return self.by_version[stage, version] if version else self.version_0[stage]

    def step(self, context: Context, i: Instruction) -> Act:
        """STEP to a version: from the previous one, by the mean gradient of the microbatches since the last STEP."""
        before, after = self.at(i.stage, i.version - 1), self.at(i.stage, i.version)
        header, allreduces, optimizer = context.header, context.allreduces, context.optimizer
        position, gradient = context.position, context.grad_buffers.of_stage(i.stage)
        size = header.weight_versions.round(i.stage)
        count = min(size, header.microbatches - size * (i.version - 1))
        unsound, gradients = self.unsound[i.stage], self.version_0[i.stage].views(gradient.total)
        norm_sees_it = (i.stage, i.version + 1) not in self.by_version

        def act() -> None:
            allreduces.finish()
            for total in gradient.numbers[0] if count > 1 else ():
                total.div_(count)
            if gradients and not norm_sees_it:
                unsound.add_(norms_on_device(gradients) * 0)
            if after is not before:
                after.weights.copy_(before.weights)
            optimizer.step((i.stage, -1), gradient, position.step, 0.0, after, i.version)

        return act

    def copy_last_to_0(self) -> None:
        """Make the last version of every stage version 0 of the next pass."""
        for stage, last in self.last.items():
            if last is not self.version_0[stage]:
                self.version_0[stage].weights.copy_(last.weights)
