"""Evaluation and prediction: a forward-only list, with the placement of the run's own list.

The list has the forwards of the run's own list in their order, so every stage is computed where the run computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mpirun.comm.fail_together import Stop, from_rank_0, on_rank_0, together
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch
from mpirun.engine.forward_list import ForwardList, Outcome
from mpirun.engine.host import Host
from mpirun.engine.read_schedule import share_program
from mpirun.engine.setup import StepOptions, set_up
from mpirun.model.forward_watch import ReadWatch
from mpirun.model.loss import loss_and_metrics, without_padding
from mpirun.model.rng import LOSS, derived_seed
from mpirun.training.batches import LossWeight, StepBatches, loss_weight
from mpirun.training.session import Session
from schedgen.checker import check
from schedgen.compiler.forward_only import forward_list
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.util.errors import UsageError


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

    def __init__(self, session: Session, example: Microbatch, options: StepOptions, host: Host) -> None:
        """`example`: what a microbatch looks like. Collective."""
        comm, count = session.comm, session.header.microbatches * options.passes
        program = on_rank_0(comm, lambda: _forwards(session))
        fetched = set[int]() if program is None else set(program.rows.stage[program.rows_of(Op.FETCH_W)].tolist())
        follow_eval = from_rank_0(comm, session.setup.unsliced_model.origin.check_eval)  # the same on every rank
        if follow_eval is not None:
            stages = session.interpreter.stages.values()
            together(comm, lambda: [follow_eval(stage.module) for stage in stages])

        def in_eval(stage: int, module: nn.Module) -> None:
            with ReadWatch(x for x in module.parameters() if x.requires_grad) as watch:
                module.eval()
            if watch.read and stage in fetched:  # on rank 0 alone
                raise UsageError(
                    f"eval() of stage {stage} uses its trained weights, as layers that merge an adapter do, "
                    "but ranks fetch them only afterwards: leave adapters unmerged, or take a schedule that fetches no "
                    "weights, such as ddp"
                )
            if follow_eval is not None:
                follow_eval(module)

        forwards = share_program(comm, program).program
        self.batches = StepBatches(example, count)
        model = session.setup.unsliced_model
        self.setup = set_up(comm, forwards.header, model, self.batches, options, host, prepare=in_eval)
        run = session.interpreter.context
        self.list = ForwardList(comm, forwards, self.setup, run)

    def run(self, step: int, batch: Batch, outcome: Outcome) -> None:
        """Run the forwards of a batch; `outcome` is called for each microbatch on the rank that has the output."""
        self.batches.give(step, batch)
        self.list.execute(step, outcome)


def evaluate(session: Session, batches: Iterable[tuple[Evaluator, Batch]], weigh: LossWeight | None) -> Evaluation:
    """The loss and the metrics of all samples; `weigh`: an Engine's `loss_weight`.

    Stop if the loss is of the whole minibatch or returns different metrics by microbatch, or if no samples count.
    """
    model = session.setup.model
    if model.loss_of == "minibatch":
        raise Stop(
            "evaluate: the model's loss is of the whole minibatch: take predict(each=) and compute it from the outputs"
        )
    found: dict[int, tuple[float, dict[str, float], float, int]] = {}  # by microbatch: loss, metrics, weight, samples

    def add(number: int, output: Any, batch: Microbatch) -> None:
        if (facts := session.setup.shapes[-1].loss) is not None and facts.draws:
            session.setup.device.seed(derived_seed(session.setup.seed, number, LOSS))
        samples = batch.size - batch.padding
        weight = samples if weigh is None else loss_weight(weigh, batch)
        if not weight:
            found[number] = 0.0, {}, 0, samples
            return
        loss, metrics = loss_and_metrics(model.loss, output, batch)
        found[number] = float(loss), {name: float(value) for name, value in metrics.items()}, weight, samples

    _run(session, batches, add)
    everything = {key: value for of_rank in session.comm.allgather(found) for key, value in of_rank.items()}
    counted = [everything[key] for key in sorted(everything) if everything[key][2]]
    if not counted:
        raise Stop("evaluate: there are no samples" + (", or loss_weight is 0 for all" if weigh is not None else ""))
    total = sum(weight for _, _, weight, _ in counted)
    names = counted[0][1].keys()
    for _, values, _, _ in counted:
        if values.keys() != names:
            others = f"{sorted(values)}, but {sorted(names)} for the first microbatch"
            raise Stop(f"evaluate: the loss returned the metrics {others}")
    means = {name: sum(values[name] * weight for _, values, weight, _ in counted) / total for name in names}
    loss = sum(loss * weight for loss, _, weight, _ in counted) / total
    return Evaluation(loss, means, sum(samples for *_, samples in everything.values()))


def predict(
    session: Session,
    batches: Iterable[tuple[Evaluator, Batch]],
    each: Callable[[int, Any], None] | None,
) -> Any:
    """The outputs of all samples in their order, nested like one output, on rank 0; None elsewhere.

    `each` is called with the number of a microbatch and its output on the rank that has it; then there is no result.
    """
    rebuild = session.setup.model.origin.rebuild
    outputs: dict[int, tuple[int, Any]] = {}  # by microbatch, how many samples and their output

    def keep(number: int, output: Any, batch: Microbatch) -> None:
        if batch.padding < batch.size or not batch.size:
            own = without_padding("output", output, batch) if batch.padding else output
            own = own if rebuild is None else rebuild(own)
            if each is None:
                copied = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), own)
                outputs[number] = batch.size - batch.padding, copied
            else:
                each(number, own)

    _run(session, batches, keep)
    if each is not None:
        return None
    of_ranks = session.comm.gather(outputs)
    return on_rank_0(session.comm, lambda: _joined(of_ranks or []))


def _joined(of_ranks: Sequence[Mapping[int, tuple[int, Any]]]) -> Any:
    """The outputs of all microbatches joined along dimension 0; UsageError if they do not fit together.

    `of_ranks`: by rank and number of the microbatch, its samples and its output.
    """
    everything = {number: output for of_rank in of_ranks for number, output in of_rank.items()}
    sizes = [everything[number][0] for number in sorted(everything)]
    ordered = [everything[number][1] for number in sorted(everything)]
    if not ordered:
        return None
    leaves = list(zip(*(pytree.tree_leaves(output) for output in ordered), strict=True))
    if any(
        isinstance(part, torch.Tensor) and part.shape[1:] != parts[0].shape[1:] for parts in leaves for part in parts
    ):
        raise UsageError("predict: outputs of several shapes cannot be joined: take each of them with each=")
    if len(ordered) > 1 and any(isinstance(part, torch.Tensor) and not part.dim() for part, *_ in leaves):
        raise UsageError("predict: outputs without dimensions cannot be joined: take each of them with each=")
    for size, part in [pair for parts in leaves for pair in zip(sizes, parts, strict=True) if len(ordered) > 1]:
        if isinstance(part, torch.Tensor) and _has_samples_elsewhere(part, size):
            raise UsageError(
                f"predict: outputs are joined along dimension 0, but that of {size} samples has shape "
                f"{tuple(part.shape)}: give outputs with the samples in dimension 0, or take each of them with each="
            )
    joined = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0] for parts in leaves
    ]
    return pytree.tree_unflatten(joined, pytree.tree_structure(ordered[0]))


def _has_samples_elsewhere(x: torch.Tensor, size: int) -> bool:
    """Whether a tensor of `size` samples has neither one nor, as flattened ones have, several rows for each of them.

    The last dimension does not count: it may be of classes, as many as there are samples.
    """
    return len(x) != size and (size in x.shape[1:-1] or len(x) % max(1, size) > 0)


def _run(session: Session, batches: Iterable[tuple[Evaluator, Batch]], outcome: Outcome) -> None:
    """Run all batches; `outcome` takes a microbatch's number among those of all batches."""
    with session.model_values(), torch.no_grad():
        for step, (evaluator, batch) in enumerate(batches):
            first = step * evaluator.batches.count
            evaluator.run(step, batch, lambda number, *found, first=first: outcome(first + number, *found))
            session.beat()


def _forwards(session: Session) -> Program:
    program = session.schedule.all_ranks
    assert program is not None
    forwards = forward_list(program)
    check(forwards, "internal error, the list of forwards")
    return forwards
