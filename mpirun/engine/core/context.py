"""What the acts of a rank work with, and what the core asks of the features around it.

Every instruction becomes an act once, before the first step. The core imports none of the features. The set-up
(`engine.build`) hands them over in the `Context`; a feature that a run does not use does nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpirun.comm.device import Device
from mpirun.comm.ordered_allreduce import AllreduceQueue
from mpirun.comm.transport import Transport
from mpirun.data.microbatches import Microbatch, MicrobatchReader, Position
from mpirun.engine.core.buffers import LocalBuffers
from mpirun.engine.core.grad_buffers import GradBuffers
from mpirun.engine.core.split_backward import WeightHalf
from mpirun.engine.core.stage import LocalStage, SavedForward
from mpirun.model.dataflow import Dataflow
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Kind, Op

if TYPE_CHECKING:  # the core imports no feature: here it names their types
    from mpirun.engine.core.offload import SavedTensors
    from mpirun.engine.grad_norm import GradNorms
    from mpirun.engine.loss import MinibatchLoss
    from mpirun.engine.memory_slots import MemorySlots
    from mpirun.engine.optimizer import Optimizer
    from mpirun.engine.weight_versions import StageVersions

Act = Callable[[], object]  # knows its operands; its return value is ignored
# Computes the loss of a microbatch from the last stage's outputs, and puts its metrics into the dict.
Score = Callable[[Microbatch, dict[str, Tensor], list[Tensor]], Tensor]

# From what computes a job to what also surrounds it, such as a graph that is replayed, or buffers that are restored.
Around = Callable[[Instruction, LocalStage, Callable[..., Any]], Callable[..., Any]]


def in_order(first: Act, second: Act) -> Act:
    """An act that runs `first`, then `second`."""

    def act() -> None:
        first()
        second()

    return act


class PendingBackward:
    """What a forward, or the first half of a backward, keeps for later jobs of the same stage and microbatch."""

    __slots__ = ("half", "loss_gradient", "saved", "tensors")
    saved: SavedForward
    tensors: SavedTensors  # where what the forward saves leaves the device
    half: WeightHalf | None
    loss_gradient: Tensor  # last stage only: the gradient that its backward starts from


@dataclass(frozen=True, kw_only=True)
class Context:
    """One rank's part of a run. Each instruction's act binds what it needs from it."""

    header: Header
    instructions: Sequence[Instruction]
    shapes: Sequence[StageShape]
    dataflow: Dataflow
    seed: int
    device: Device
    position: Position  # the step and pass being executed
    stages: Mapping[int, LocalStage]  # by number: those that the rank owns or computes, or whose gradients it forwards
    slots: MemorySlots  # where received buffers lie
    transport: Transport
    allreduces: AllreduceQueue  # the sums over ranks in flight
    buffers: LocalBuffers  # x, g and w by name, and dw that are sent
    grad_buffers: GradBuffers  # dw
    microbatches: MicrobatchReader
    saved_sizes: dict[int, list[int]] = field(default_factory=dict)  # by stage, of what is lent: bytes

    # What jobs leave for later instructions.
    pending: dict[tuple[int, int], PendingBackward] = field(default_factory=dict)  # by stage and microbatch
    losses: dict[int, Tensor] = field(default_factory=dict)  # by microbatch, since the last NORM
    metrics: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # as `losses`

    # The features around the core.
    score: Callable[[LocalStage, Instruction], Score]  # of the last stage
    minibatch_loss: MinibatchLoss | None  # in place of `score`
    around: Around
    versions: StageVersions
    optimizer: Optimizer
    norms: GradNorms
    other_sums: Mapping[int, Callable[[Context, Instruction], Act]]  # ALLREDUCE of a t, x or g, by kind

    def stage_of(self, i: Instruction) -> LocalStage:
        """The stage, with the version of its weights that the instruction names."""
        return self.versions.at(i.stage, i.version) if i.version >= 0 else self.stages[i.stage]

    def pending_of(self, i: Instruction) -> PendingBackward:
        """What jobs of the same stage and microbatch keep for later ones."""
        return self.pending.setdefault((i.stage, i.mb), PendingBackward())

    @cached_property
    def saving(self) -> set[tuple[int, int]]:
        """The stages and microbatches whose FWD keeps its graph: a backward follows without a RECOMPUTE before it."""
        redone = {(i.stage, i.mb) for i in self.instructions if i.op == Op.RECOMPUTE}
        return {(i.stage, i.mb) for i in self.instructions if i.op in (Op.BWD, Op.BWD_I)} - redone

    @cached_property
    def lent(self) -> set[tuple[int, int]]:
        """The stages and microbatches of which it sends away what it saves for its own backward."""
        sent = {(i.stage, i.mb) for i in self.instructions if i.op == Op.SEND and i.kind == Kind.SAVED}
        return sent & {(i.stage, i.mb) for i in self.instructions if i.op in (Op.BWD, Op.BWD_I)}

    @cached_property
    def offloaded(self) -> set[tuple[int, int]]:
        """The stages and microbatches of which what is saved for the backward leaves the device meanwhile."""
        return self.lent | {(i.stage, i.mb) for i in self.instructions if i.op == Op.OFFLOAD and i.kind == Kind.SAVED}

    def is_last(self, stage: int) -> bool:
        """Whether a stage has the loss."""
        return not self.header.graph.consumers[stage]

    def wait_for_weights(self, i: Instruction) -> Callable[[], object] | None:
        """A function that waits until all shards of the stage's weights have arrived; None: they are never fetched."""
        if i.stage not in self.slots.fetched:
            return None
        shards = [self.buffers.get(Kind.W, i.stage, piece=shard) for shard in self.stages[i.stage].shard_spans]
        return lambda: [self.buffers.wait_value(shard) for shard in shards]
