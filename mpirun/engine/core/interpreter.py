"""The interpreter: one rank executes its list of instructions, step after step.

`Interpreter.table` maps every opcode to what prepares it. Before the first step each instruction becomes an act, a
function without arguments that knows its tensors, its requests and its peers. A step calls the acts in the order of the
list. The list alone decides the order: transfers start where the list starts them, and an act that needs an operand
waits until the operand has arrived.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpirun.engine.core.backward import Backward, WeightBackward
from mpirun.engine.core.context import Act, Context, in_order
from mpirun.engine.core.forward import Forward
from mpirun.engine.core.messages import Sums, Transfers
from mpirun.engine.core.offload import Offloads
from mpirun.engine.core.optimizer_step import OptimizerStep, StepResult
from mpirun.watchdog import NOTHING, PHASE, ROW, STEP, TRAINING
from schedgen.ir.instructions import Instruction, Kind, Op


class Interpreter:
    """A rank's list, prepared, and the loop that executes it."""

    def __init__(self, context: Context, state: memoryview) -> None:
        """Prepare all instructions. Collective. `state`: the words that the watchdog reads."""
        self.context, self.header, self.stages, self.state = context, context.header, context.stages, state
        self.transport, self.position = context.transport, context.position
        self.microbatches = context.microbatches
        transfers, sums, offloads = Transfers(context), Sums(context), Offloads(context)
        self.optimizer_step = OptimizerStep(context)
        self.table: dict[int, Callable[[int, Instruction], Act]] = {  # each takes the instruction and its row
            Op.FETCH_W: transfers.fetch_w,
            Op.RECV: lambda row, i: (offloads if i.kind == Kind.SAVED else transfers).recv(row, i),
            Op.SEND: lambda row, i: (offloads if i.kind == Kind.SAVED else transfers).send(row, i),
            Op.FWD: lambda row, i: Forward(context, i),
            Op.BWD: lambda row, i: Backward(context, i),
            Op.BWD_I: lambda row, i: Backward(context, i),
            Op.BWD_W: lambda row, i: WeightBackward(context, i),
            Op.RECOMPUTE: lambda row, i: Forward(context, i),
            Op.ADD: sums.add,
            Op.ALLREDUCE: sums.allreduce,
            Op.NORM: self.optimizer_step.norm,
            Op.STEP: self.optimizer_step.step,
            Op.FREE: lambda row, i: (offloads if i.kind in (Kind.SAVED, Kind.OPT) else transfers).free(row, i),
            Op.OFFLOAD: offloads.offload,
            Op.RELOAD: offloads.reload,
        }
        self.code = [self.table[i.op](row, i) for row, i in enumerate(context.instructions)]
        for row, wait in offloads.waiting_acts(context.instructions):
            self.code[row] = in_order(wait, self.code[row])
        for row, zero in context.grad_buffers.zeroing_acts(context.instructions):
            self.code[row] = in_order(zero, self.code[row])
        for row, complete in context.grad_buffers.completing_acts(context.instructions):
            self.code[row] = in_order(self.code[row], complete)
        self.execute_list: Callable[[], None] = self.execute  # a trace replaces it

    def run(self, step: int) -> StepResult:
        """Execute the list once, for a step; no autograd graph may be alive."""
        context = self.context
        self.position.step = self.state[STEP] = step
        self.state[PHASE] = TRAINING
        # Drop what an interrupted step has kept: this one may have other data.
        self.microbatches.forget()
        context.losses.clear()
        context.metrics.clear()
        if context.minibatch_loss is not None:
            context.minibatch_loss.forget()
        context.optimizer.take_assigned()
        for index in context.slots.fetched:  # another interpreter, or the script, may have moved `data`
            self.stages[index].use_weights()
        context.grad_buffers.detach()
        self.execute_list()
        for stage in self.stages.values():
            stage.give_back()
        self.state[ROW] = NOTHING
        return self.optimizer_step.result

    def execute(self) -> None:
        """Call the acts in their order, and show the watchdog which one runs."""
        state, code = self.state, self.code
        if torch._C._autograd._profiler_enabled():
            code = [in_range(act, i) for act, i in zip(code, self.context.instructions, strict=True)]
        for row, act in enumerate(code):
            state[ROW] = row
            act()


def in_range(act: Act, i: Instruction) -> Act:
    """An act that torch.profiler shows as a range, such as `FWD 1.0`: the opcode, the stage and the microbatch."""
    operand = i.buffer if i.kind else ".".join(str(number) for number in (i.stage, i.mb) if number >= 0)
    name = f"{Op(i.op).name} {operand}".rstrip()

    def run() -> None:
        with torch.autograd.profiler.record_function(name):
            act()

    return run
