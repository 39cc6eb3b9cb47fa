"""Evaluation and prediction: a forward-only list, with the stages and the placement of the run's own list.

The list has the forwards of the run's own list in their order, so every stage is computed where the run computes it. It
uses the run's weights, and its own memory slots for received buffers. While it executes, modules are in eval mode, and
nothing is kept for a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils import _pytree as pytree

from mpirun.comm.fail_together import Stop, on_rank_0
from mpirun.comm.gpu_transport import make_transport
from mpirun.comm.ordered_allreduce import AllreduceQueue
from mpirun.comm.transport import NO_ROW
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch, MicrobatchReader, Position, joined
from mpirun.engine.core.buffers import LocalBuffers
from mpirun.engine.core.context import Context, Score
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.memory_slots import MemorySlots
from mpirun.engine.other_sums import SliceSums
from mpirun.engine.read_schedule import share_program
from mpirun.engine.setup import Setup
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.loss import loss_and_metrics, loss_input, without_padding
from mpirun.model.rng import LOSS, derived_seed
from mpirun.training.batches import LossWeight, StepBatches, loss_weight, shares
from mpirun.training.session import Session, mean, means
from mpirun.watchdog import WORDS
from schedgen.checker import check
from schedgen.compiler.compile import forward_list
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


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found; the same on all ranks.

    loss     the mean over the samples, or over what `loss_weight` counts
    metrics  what the loss returned besides its value: such means, too, by name
    samples  how many there were, without padding
    """

    loss: float
    metrics: Mapping[str, float]
    samples: int


class Evaluator:
    """A run's forward-only list, prepared for microbatches of one shape."""

    def __init__(self, session: Session, example: Microbatch, set_up: Callable[..., Setup]) -> None:
        comm = session.comm
        program = on_rank_0(comm, lambda: _forwards(session))
        forwards = share_program(comm, program).program
        self.batches = StepBatches(example, session.header.microbatches)
        model = session.setup.unsliced_model
        self.setup = set_up(forwards.header, model, self.batches, prepare=lambda _, module: module.eval())
        self.list = ForwardList(comm, forwards, self.setup, session.interpreter.context)

    def run(self, step: int, batch: Batch, outcome: Outcome) -> None:
        """Run the forwards of a batch; `outcome` is called for each microbatch on the rank that has the output."""
        self.batches.give(step, batch)
        self.list.execute(step, outcome)


def evaluate(session: Session, batches: Iterable[tuple[Evaluator, Batch]], weigh: LossWeight | None) -> Evaluation:
    """The loss and the metrics of all samples; `weigh`: an Engine's `loss_weight`.

    A loss of the whole minibatch is one of a batch. Stop if the loss returns different metrics by microbatch, or if no
    samples count.
    """
    model, minibatch = session.setup.model, session.interpreter.context.minibatch_loss
    own: dict[int, tuple[float, dict[str, float], float, int]] = {}  # by microbatch: loss, metrics, weight, samples

    def add(number: int, output: Any, batch: Microbatch) -> None:
        session.setup.device.seed(derived_seed(session.setup.seed, number, LOSS))
        samples = batch.size - batch.padding
        weight = samples if weigh is None else loss_weight(weigh, batch)
        own[number] = 0.0, {}, weight, samples
        if minibatch is not None:
            minibatch.add_outputs(number, [output] if isinstance(output, Tensor) else output, batch)
        elif weight:
            score(loss_and_metrics(model.loss, output, batch), [number])

    def score(made: tuple[Tensor, dict[str, Tensor]], numbers: Iterable[int]) -> None:
        loss, metrics = float(made[0]), {name: float(value) for name, value in made[1].items()}
        own.update((number, (loss, metrics, *own[number][2:])) for number in numbers)

    def end_step() -> None:
        if minibatch is not None and minibatch.collected:
            score(minibatch.loss(), minibatch.collected)
            minibatch.forget()

    _run(session, batches, add, end_step)
    by_microbatch = {number: one for of_rank in session.comm.allgather(own) for number, one in of_rank.items()}
    losses, metrics, weights, samples = map(
        list, zip(*(by_microbatch[key] for key in sorted(by_microbatch)), strict=True)
    )
    if not any(weights):
        raise Stop("evaluate: there are no samples" + (", or loss_weight is 0 for all" if weigh is not None else ""))
    part = shares(weights)
    return Evaluation(mean(losses, part), means(metrics, part, "the evaluation"), sum(samples))


def predict(
    session: Session, batches: Iterable[tuple[Evaluator, Batch]], each: Callable[[int, Any], None] | None
) -> Any:
    """The outputs of all samples in their order, nested like one output, on rank 0; None elsewhere.

    `each` is called with the number of a microbatch and its output on the rank that has it; then there is no result.
    """
    rebuild = session.setup.model.origin.rebuild
    outputs: dict[int, Any] = {}  # by microbatch

    def keep(number: int, output: Any, batch: Microbatch) -> None:
        if batch.padding < batch.size or not batch.size:
            output = without_padding("output", output, batch) if batch.padding else output
            output = output if rebuild is None else rebuild(output)
            if each is None:
                outputs[number] = pytree.tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), output)
            else:
                each(number, output)

    _run(session, batches, keep)
    if each is not None:
        return None
    of_ranks = session.comm.gather(outputs)
    return on_rank_0(session.comm, lambda: _joined(of_ranks or []))


def _joined(of_ranks: Sequence[Mapping[int, Any]]) -> Any:
    """The outputs of all microbatches joined along dimension 0; torch refuses those that cannot be: take `each`.

    `of_ranks`: by rank and number of the microbatch, its output.
    """
    by_number = {number: output for of_rank in of_ranks for number, output in of_rank.items()}
    ordered = [by_number[number] for number in sorted(by_number)]
    if len(ordered) < 2:
        return ordered[0] if ordered else None
    leaves = zip(*map(pytree.tree_leaves, ordered), strict=True)
    return pytree.tree_unflatten(map(joined, leaves), pytree.tree_structure(ordered[0]))


def _run(
    session: Session,
    batches: Iterable[tuple[Evaluator, Batch]],
    outcome: Outcome,
    end_step: Callable[[], None] = lambda: None,
) -> None:
    """Run all batches; `outcome` takes a microbatch's number among those of all batches."""
    with session.model_values(), torch.no_grad():
        for step, (evaluator, batch) in enumerate(batches):
            first = step * evaluator.batches.count
            evaluator.run(step, batch, lambda number, *scored, first=first: outcome(first + number, *scored))
            end_step()
            session.beat()


def _forwards(session: Session) -> Program:
    program = session.schedule.all_ranks
    assert program is not None
    forwards = forward_list(program)
    check(forwards, "internal error, the list of forwards")
    return forwards
