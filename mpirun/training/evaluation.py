"""Evaluation and prediction: a forward-only list, with the placement of the run's own list.

The list has the forwards of the run's own list in their order, so every stage is computed where the run computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpirun.comm.fail_together import Stop, on_rank_0
from mpirun.data.chunks import joined
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch
from mpirun.engine.forward_list import ForwardList, Outcome
from mpirun.engine.read_schedule import share_program
from mpirun.engine.setup import Setup
from mpirun.model.loss import loss_and_metrics, without_padding
from mpirun.model.rng import LOSS, derived_seed
from mpirun.training.batches import LossWeight, StepBatches, loss_weight, shares
from mpirun.training.session import Session, mean, means
from schedgen.checker import check
from schedgen.compiler.forward_only import forward_list
from schedgen.ir.program import Program


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

        def in_eval(_: int, module: nn.Module) -> None:
            module.eval()

        forwards = share_program(comm, program).program
        self.batches = StepBatches(example, session.header.microbatches)
        model = session.setup.unsliced_model
        self.setup = set_up(forwards.header, model, self.batches, prepare=in_eval)
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
    session: Session,
    batches: Iterable[tuple[Evaluator, Batch]],
    each: Callable[[int, Any], None] | None,
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
