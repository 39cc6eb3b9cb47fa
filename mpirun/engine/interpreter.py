"""The interpreter: one rank executes its list of instructions, step after step.

`Interpreter.table` maps every opcode to the method that prepares it. Before the first step each instruction becomes an
act, a function without arguments that knows its tensors, its requests and its peers. A step calls the acts in the order
of the list. The list alone decides the order: transfers start where the list starts them, and an act that needs an
operand waits until the operand has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpirun.comm.progress_thread import MessageProgress
from mpirun.engine.act import Act, in_order
from mpirun.engine.allreduces import OwnerAllreduce, SliceAllreduce, tied_allreduce
from mpirun.engine.context import Context
from mpirun.engine.forward_backward import ForwardBackward
from mpirun.engine.job_graphs import JobGraphs
from mpirun.engine.messages import Transfers
from mpirun.engine.optimizer_step import OptimizerStep, StepResult
from mpirun.engine.weight_versions import StageVersions
from mpirun.watchdog import NOTHING, PHASE, ROW, STEP, TRAINING
from schedgen.ir.instructions import Instruction, Kind, Op


class Interpreter:
    """A rank's list, prepared, and the loop that executes it."""

    def __init__(
        self, context: Context, state: memoryview, under_way: Sequence[int], progress: MessageProgress | None
    ) -> None:
        """Prepare all instructions. Collective.

        state      the words that the watchdog reads
        under_way  by row, the bytes in flight while the instruction runs
        progress   the hooks and thread of another interpreter with the same modules; None: new ones
        """
        self.context, self.header, self.stages, self.state = context, context.header, context.stages, state
        self.transport, self.position, self.optimizer = context.transport, context.position, context.optimizer
        transport, device = context.transport, context.setup.device
        self.progress = progress or MessageProgress(transport.comm, transport.poll, device)
        self.under_way = under_way
        self.timed = False  # whether the first step is done, by `run_first`
        self.reached: set[tuple[int, str]] = set()  # (stage, parameter) that got a gradient in the first step
        self.versions = StageVersions(context)
        blocks, rank = context.slots.blocks, transport.comm.rank
        self.graphs = JobGraphs(device, rank, blocks) if context.setup.graphs else None
        self.forward_backward = ForwardBackward(context, self.versions, self.graphs)
        self.microbatches = self.forward_backward.microbatches
        messages = Transfers(context)
        self.owner_allreduce = OwnerAllreduce(context, messages.partial_sums)
        self.slice_allreduce = SliceAllreduce(context)
        self.optimizer_step = OptimizerStep(
            context, self.versions, self.forward_backward.losses, self.forward_backward.metrics
        )
        self.table: dict[int, Callable[[int, Instruction], Act]] = {
            Op.FETCH_W: messages.fetch_w,
            Op.RECV: messages.recv,
            Op.SEND: messages.send,
            Op.FWD: self.forward_backward.fwd,
            Op.BWD: self.forward_backward.bwd,
            Op.BWD_I: self.forward_backward.bwd_i,
            Op.BWD_W: self.forward_backward.bwd_w,
            Op.RECOMPUTE: self.forward_backward.recompute,
            Op.ADD: self.owner_allreduce.add,
            Op.ALLREDUCE: self.allreduce,
            Op.NORM: self.optimizer_step.norm,
            Op.STEP: self.optimizer_step.step,
            Op.FREE: messages.free,
        }
        self.code = [self.table[i.op](row, i) for row, i in enumerate(context.instructions)]
        for row, zero in context.grad_buffers.zeroing_acts(context.instructions):
            self.code[row] = in_order(zero, self.code[row])
        for row, complete in context.grad_buffers.completing_acts(context.instructions):
            self.code[row] = in_order(self.code[row], complete)
        self.execute_list: Callable[[], None] = self.execute  # --trace replaces it

    def allreduce(self, row: int, i: Instruction) -> Act:
        """ALLREDUCE: of a dw over the owners of a stage, of a t over tied stages, of an x or g over slices."""
        if i.kind == Kind.DW:
            return self.owner_allreduce.allreduce(row, i)
        if i.kind == Kind.T:
            return tied_allreduce(self.context, i)
        return self.slice_allreduce.allreduce(row, i)

    def use(self) -> None:
        """Let what looks for messages look for this interpreter's, after another was in use."""
        self.progress.poll = self.transport.poll

    def run(self, step: int) -> StepResult:
        """Execute the list once for every accumulation pass of a step; no autograd graph may be alive."""
        self.position.step = self.state[STEP] = step
        self.state[PHASE] = TRAINING
        self.forward_backward.forget_pass()
        self.optimizer.take_assigned()
        for index in self.context.slots.fetched:  # another interpreter, or the script, may have moved `data`
            self.stages[index].use_weights()
        self.context.grad_buffers.detach()
        losses: list[float] = []
        metrics: list[dict[str, float]] = []
        for number in range(self.position.passes):
            self.position.accumulation_pass = number
            if self.graphs is not None:
                self.graphs.begin_pass()
            self.context.setup.device.use_words(self._allocates_nothing())
            self.execute_list()
            losses += self.optimizer_step.result.losses
            metrics += self.optimizer_step.result.metrics
        for stage in self.stages.values():
            stage.give_back()
        self.state[ROW] = NOTHING
        return self.optimizer_step.result._replace(losses=losses, metrics=metrics)

    def _allocates_nothing(self) -> bool:
        """Whether passes no longer allocate memory or load kernels, which may wait for streams that wait for words."""
        return self.timed and (self.graphs is None or self.graphs.captured)

    def execute(self) -> None:
        """Call the acts in their order, and show the watchdog which one runs."""
        state = self.state
        for row, act in enumerate(self.code):
            state[ROW] = row
            act()
