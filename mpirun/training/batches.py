"""The microbatches of the steps that a script gives, as the engine reads them: by step and number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from mpi4py import MPI

from mpirun.comm.fail_together import Stop, first_difference, together
from mpirun.data.chunks import chunk, repeated, sample_count, spans
from mpirun.data.loader import Batch, microbatch_of, real_samples
from mpirun.data.microbatches import Microbatch, MicrobatchSource, Pair, digest, input_and_target, plain
from mpirun.data.values import copy_of, digest_of
from mpirun.model.contract import Model
from mpirun.model.dataflow import Input
from mpirun.model.loss import without_padding
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op
from schedgen.util.errors import UsageError, clip

# What to do about a script's own batches if they have not one size.
SMALLER = "leave out an epoch's smaller last batch (drop_last=True), or take run.loader, which pads it"
LossWeight = Callable[[Any], float]  # target -> the weight of a microbatch's loss


class StepBatches(MicrobatchSource):
    """The microbatches of a script's steps: those of the current step, and those kept or made again."""

    def __init__(self, example: Microbatch, count: int) -> None:
        """`example`: what a microbatch looks like; `count`: microbatches of a step."""
        self.example, self.count = example, count
        self.step = -1
        self.current: Mapping[int, Microbatch] = {}
        self.kept: dict[int, Batch] = {}  # by step; of a loader's batch only its place: the loader can make it again
        self.divisors: dict[int, Sequence[float]] = {}  # by step that is kept, if `give` got weights

    def give(self, step: int, batch: Batch, keep: bool = False, weights: Sequence[float] | None = None) -> None:
        """Set the batch of a step; `keep`: it will be needed after the step, too.

        `weights`: of the microbatches' losses in the step's loss; None: they count by their samples.
        """
        if weights is not None:
            total = sum(weights)
            divisors = [total / weight if weight else math.inf for weight in weights]
            weighted = {mb: _weighted(made, divisors[mb]) for mb, made in batch.microbatches.items()}
            batch = replace(batch, microbatches=weighted)
        self.step, self.current = step, batch.microbatches
        if keep:  # copies: the script may change the tensors of its batch after the step
            copies = copy_of(dict(batch.microbatches)) if batch.loader is None else {}
            self.kept[step] = replace(batch, microbatches=copies)
            if weights is not None:
                self.divisors[step] = divisors

    def __call__(self, step: int, number: int) -> Microbatch:
        """A microbatch of the current step, or of one that was kept; UsageError if it cannot be made again."""
        if step == self.step and number in self.current:
            return self.current[number]
        batch = self.kept[step]
        if batch.loader is None:
            return batch.microbatches[number]
        made = batch.loader.microbatch(batch.epoch, batch.number, number)
        return _weighted(made, self.divisors[step][number]) if step in self.divisors else made


def check_same_batch(comm: MPI.Intracomm, batch: Batch, name: str) -> None:
    """Stop if ranks have different batches, all of which each rank has. Collective. `name`: for the message."""
    hashed = {name: digest_of(map(digest, batch.microbatches.values()))} if comm.size > 1 else {}
    if (difference := first_difference(comm, hashed)) is not None:
        raise Stop(
            f"{name}: ranks {difference[1]} and {difference[2]} give different batches: seed the loader, "
            "DataLoader(..., generator=), and what its samples draw, or use run.loader; or they were made from a "
            "module that a rank does not train",
            1,
        )


def loss_weights(weigh: LossWeight, batch: Batch, comm: MPI.Intracomm) -> list[float]:
    """By microbatch of a step, its weight by an Engine's `loss_weight`. Collective.

    Stop if all are 0, or as in `loss_weight`.
    """
    own = together(comm, lambda: {number: loss_weight(weigh, made) for number, made in batch.microbatches.items()})
    of_ranks = comm.allgather(own)
    everything = {number: weight for of_rank in of_ranks for number, weight in of_rank.items()}
    if not any(everything.values()):
        raise Stop("loss_weight: every microbatch of the step has weight 0, so the step has no loss")
    return [everything[number] for number in sorted(everything)]


def loss_weight(weigh: LossWeight, microbatch: Microbatch) -> float:
    """The weight of a microbatch by an Engine's `loss_weight`.

    UsageError if it is not a number that can be a weight.
    """
    if microbatch.padding == microbatch.size:
        return 0.0
    target = pytree.tree_map(lambda x: x, microbatch.target)  # containers of its own, as a loss has
    given = weigh(without_padding("target", target, microbatch) if microbatch.padding else target)
    weight = float(given)
    if not 0 <= weight < 1e300:  # so that sums are finite
        raise UsageError(f"loss_weight returned {clip(repr(given))}: it should be a finite number of at least 0")
    return weight


def shares(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def _weighted(microbatch: Microbatch, divisor: float) -> Microbatch:
    """A microbatch whose loss is divided by `divisor`; if that is infinite it is padding, since its loss may be NaN."""
    padding = microbatch.size if math.isinf(divisor) else microbatch.padding
    return microbatch._replace(loss_divisor=divisor, padding=padding)


def read_by(rank_list: Sequence[Instruction], header: Header, model: Model) -> list[int]:
    """The microbatches of a step that a rank reads, in the order of its list; `model`: with tensor slices.

    Inputs are read by stages with an `Input`, targets by the last stage.
    """
    reads_input = [
        any(isinstance(source, Input) for source in model.reads[stage])
        if model.reads is not None
        else not header.graph.producers[stage]
        for stage in range(header.stages)
    ]
    numbers = (
        i.mb
        for i in rank_list
        if i.op in (Op.FWD, Op.RECOMPUTE) and (reads_input[i.stage] or not header.graph.consumers[i.stage])
    )
    return list(dict.fromkeys(numbers))


def whole_batch(data: Any, count: int, pair: Pair, size: int | None = None, uneven: bool = False) -> Batch:
    """A minibatch that every rank has as a whole, cut into `count` microbatches. UsageError if it cannot be cut.

    size    samples of a microbatch at least, to which the batch is padded; None: it may not be padded
    uneven  microbatches may differ by a sample; one without samples is padding
    """
    data = plain((data,) if isinstance(data, torch.Tensor) else data)
    input_and_target(data, "the batch should be a pair (input, target), (input,) or a mapping, not")
    samples = sample_count(data)
    if samples < 1 or (samples % count and size is None and not uneven):
        raise UsageError(f"a batch of {samples} samples cannot be cut into {count} microbatches of one size: {SMALLER}")
    size = 0 if uneven else max(size or 0, -(-samples // count))
    real = [span.stop - span.start for span in spans(samples, count)] if uneven else real_samples(samples, size, count)
    if samples < size * count:
        data = repeated(data, samples, size * count)
    parts = zip(chunk(data, count, max(samples, size * count)), real, strict=True)
    made = [microbatch_of(pair, part, samples, number, size) for part, number in parts]
    return Batch(0, 0, real, dict(enumerate(made)), size)
