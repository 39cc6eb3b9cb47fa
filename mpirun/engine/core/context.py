"""The context: everything that the instructions of a rank work with, in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpirun.comm.ordered_allreduce import AllreduceQueue
from mpirun.comm.transport import Transport
from mpirun.engine.core.act import Position
from mpirun.engine.core.buffers import LocalBuffers
from mpirun.engine.core.grad_buffers import GradBuffers
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.planned_memory import MemorySlots
from mpirun.engine.setup import Setup
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction


@dataclass(frozen=True)
class Context:
    """One rank's part of a run. `build` makes it, and each instruction's act binds what it needs from it."""

    header: Header
    instructions: Sequence[Instruction]
    setup: Setup
    stages: Mapping[int, LocalStage]  # by number: those that the rank owns or computes, or whose gradients it forwards
    slots: MemorySlots  # where received buffers lie
    transport: Transport
    allreduces: AllreduceQueue  # the allreduces in flight
    buffers: LocalBuffers  # x, g and w by name, and dw that are sent
    grad_buffers: GradBuffers  # dw
    optimizer: Optimizer
    position: Position  # the step and pass being executed
