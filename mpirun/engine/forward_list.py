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
from mpirun.engine.act import Act, Position
from mpirun.engine.allreduces import SliceAllreduce
from mpirun.engine.buffers import LocalBuffers
from mpirun.engine.context import Context
from mpirun.engine.forward import Score
from mpirun.engine.forward_backward import ForwardBackward
from mpirun.engine.messages import Transfers
from mpirun.engine.planned_memory import MemorySlots
from mpirun.engine.setup import Setup
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.loss import loss_input
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
        slots = MemorySlots(comm, program, instructions, setup.shapes, setup.dataflows[0], False, setup.device.torch)
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
        self.position = Position(setup.passes)
        context = replace(
            run, header=header, instructions=instructions, setup=setup, stages=self.stages, slots=slots,
            transport=transport, buffers=LocalBuffers(transport), allreduces=AllreduceQueue(transport),
            position=self.position,
        )  # fmt: skip
        messages, self.jobs = Transfers(context), _Forwards(context)
        table: dict[int, Callable[[int, Instruction], Act]] = {
            Op.FETCH_W: messages.fetch_w,
            Op.RECV: messages.recv,
            Op.SEND: messages.send,
            Op.FWD: self.jobs.fwd,
            Op.ALLREDUCE: SliceAllreduce(context).allreduce,
            Op.FREE: messages.free,
        }
        self.code = [table[i.op](row, i) for row, i in enumerate(instructions)]
        self.buffers = context.buffers
        weights = [i for i in instructions if i.op == Op.SEND and i.kind == Kind.W]
        self.sent_weights = {self.buffers.named_by(i) for i in weights}  # no STEP waits for their sends

    def execute(self, step: int, outcome: Outcome) -> None:
        """Run all microbatches of a step, the list once per accumulation pass, and restore the modules for the run.

        `outcome` is called for each microbatch on the rank that has the last stage's output.
        """
        self.jobs.outcome = outcome
        self.device.use_words(ready=False)
        modes = [(module, module.training) for stage in self.stages.values() for module in stage.module.modules()]
        for stage in self.stages.values():
            stage.module.eval()
        for _, here in self.moved:
            here.use_weights()
        try:
            self.position.step = step
            for number in range(self.position.passes):
                self.position.accumulation_pass = number
                for act in self.code:
                    act()
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


class _Forwards(ForwardBackward):
    """FWD without a backward: the last stage passes its output to `outcome` and computes no loss."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, StageVersions(context))
        self.outcome: Outcome

    def has_minibatch_loss(self, i: Instruction) -> bool:
        """Never: no loss is computed."""
        return False

    def score(self, i: Instruction) -> Score:
        """A function that gives the outputs to `outcome`, and returns no loss."""
        first_slice = self.header.is_first_slice(i.stage)
        first, mb = self.header.microbatches, i.mb
        zero = torch.zeros((), device=self.device)

        def give(batch: Microbatch, found: dict[str, Tensor], outputs: list[Tensor]) -> Tensor:
            if first_slice:
                self.outcome(self.position.accumulation_pass * first + mb, loss_input(outputs), batch)
            return zero

        return give
