"""A forward-only list, executed with the stages of a run, for evaluation and prediction.

It uses the run's weights, and its own memory slots for received buffers. While it executes, modules are in eval mode,
and nothing is kept for a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.gpu_transport import make_transport
from mpirun.comm.ordered_allreduce import AllreduceQueue
from mpirun.comm.transport import NO_ROW
from mpirun.data.microbatches import Microbatch
from mpirun.engine.core.buffers import LocalBuffers
from mpirun.engine.core.context import Context, Score
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.microbatch_reader import MicrobatchReader, Position
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.memory_slots import MemorySlots
from mpirun.engine.other_sums import SliceSums
from mpirun.engine.setup import Setup
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.loss import loss_input
from mpirun.watchdog import WORDS
from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.ir.program import Program

Outcome = Callable[[int, Any, Microbatch], None]  # takes a microbatch's number, the last stage's output, the microbatch


class ForwardList:
    """One rank's list of forwards, prepared."""

    def __init__(self, comm: MPI.Intracomm, program: Program, setup: Setup, run: Context) -> None:
        """Prepare the list. Collective.

        program  this rank's rows
        setup    the run's setup, but with the evaluation's microbatches and with shapes in eval mode
        run      the context of the run's own list
        """
        header, instructions = program.header, program.instructions(comm.rank)
        self.header = header
        slots = MemorySlots(comm, program, instructions, setup)
        memory = {index: slots.weights(index) for index in run.stages}
        self.stages: dict[int, LocalStage] = {}
        self.moved: list[tuple[LocalStage, LocalStage]] = []  # for each fetched stage: the run's, and this list's
        for index, block in memory.items():
            self.stages[index] = run.stages[index].elsewhere(block, setup.shapes[index])
            if block is not None:
                self.moved.append((run.stages[index], self.stages[index]))
        self.device = setup.device

        def show(row: int | None) -> None:  # the watchdog knows only the rows of the run's own list
            run.transport.on_wait(None if row is None else NO_ROW)

        self.transport = transport = make_transport(comm, header.groups, setup.crowded, show, device=setup.device)
        self.position = Position()
        context = replace(
            run, header=header, instructions=instructions, shapes=setup.shapes, dataflow=setup.dataflow,
            position=self.position, stages=self.stages, slots=slots, transport=transport,
            buffers=LocalBuffers(transport), allreduces=AllreduceQueue(transport),
            microbatches=MicrobatchReader(setup.microbatches, self.device.torch, self.position),
            other_sums={Kind.X: SliceSums().prepare},
            pending={}, losses={}, metrics={}, score=self._give, minibatch_loss=None,
            around=lambda i, stage, compute: compute, versions=StageVersions(instructions, self.stages, slots),
        )  # fmt: skip
        self.outcome: Outcome
        self.interpreter = Interpreter(context, memoryview(bytearray(8 * WORDS)).cast("q"))
        self.buffers = context.buffers
        weights = [i for i in instructions if i.op == Op.SEND and i.kind == Kind.W]
        self.sent_weights = {self.buffers.named_by(i) for i in weights}  # no STEP waits for their sends

    def _give(self, stage: LocalStage, i: Instruction) -> Score:
        zero = torch.zeros((), device=self.device.torch)
        first_slice = self.header.is_first_slice(i.stage)

        def give(batch: Microbatch, metrics: dict[str, Tensor], outputs: list[Tensor]) -> Tensor:
            if first_slice:
                self.outcome(i.mb, loss_input(outputs), batch)
            return zero

        return give

    def execute(self, step: int, outcome: Outcome) -> None:
        """Run all microbatches of a step, and restore the modules for the run.

        `outcome` is called for each microbatch on the rank that has the last stage's output.
        """
        self.outcome = outcome
        self.device.use_words(ready=False)
        modes = [(module, module.training) for stage in self.stages.values() for module in stage.module.modules()]
        for stage in self.stages.values():
            stage.module.eval()
        for _, here in self.moved:
            here.use_weights()
        try:
            self.position.step = step
            self.interpreter.execute()
            for weights in self.sent_weights:
                self.buffers.wait_sent(weights)
        finally:
            for in_run, _ in self.moved:
                in_run.use_weights()
            for stage in self.stages.values():
                stage.give_back()
            for module, training in modes:  # parents come first: `train`, which may do more, sets children, too
                if module.training != training:
                    module.train(training)
