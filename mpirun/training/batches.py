"""The microbatches of the steps that a script gives, as the engine reads them: by step and number; and their shapes.

There is one shape in a run, or one for each size that is declared (`buckets`): that of dimension 1 of the input's first
tensor that has one, the sequence length, say. Without declared sizes each rank checks only what it reads itself, from
the second step on; with them all ranks agree before each step. Some schedules and losses allow one shape only, or no
padding: the checks are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from mpi4py import MPI

from mpirun.comm.fail_together import Stop, first_difference, together
from mpirun.data.loader import Batch, microbatch_of, real_samples
from mpirun.data.microbatches import (
    Microbatch,
    MicrobatchSource,
    Pair,
    Shape,
    chunk,
    digest,
    input_and_target,
    plain,
    repeated,
    sample_count,
    spans,
)
from mpirun.data.values import copy_of, digest_of
from mpirun.model.contract import Model
from mpirun.model.dataflow import Input
from mpirun.model.loss import without_padding
from mpirun.model.split.split_result import bucket_sizes
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


class Shapes:
    """The shapes of the microbatches so far, in a run or an evaluation."""

    def __init__(self, comm: MPI.Intracomm, buckets: Sequence[int], model: Model, header: Header) -> None:
        """`buckets`: the sizes that are declared; empty: those that `split` has traced, else there is one shape.

        UsageError if they are no sizes, or if the model or the schedule needs microbatches of one shape.
        """
        traced, sizes = model.origin.buckets, bucket_sizes(buckets or model.origin.buckets)
        refused = {
            f"split has traced {traced or 'one shape'}: give it these buckets=, too": (
                model.origin.traced and not {*sizes} <= {*traced}
            ),
            "a loss of the whole minibatch needs microbatches of one shape": model.loss_of == "minibatch",
            "this schedule updates stages one by one: all steps need one shape": not header.has_flush,
        }
        for why in [why for why, applies in refused.items() if applies and sizes]:
            raise UsageError(f"buckets: {why}")
        self.comm, self.buckets = comm, sizes
        self.any = model.origin.call is not None and not self.buckets  # no shape is checked
        self.by_size: dict[int | None, Shape] = {}

    def anew(self) -> Shapes:
        """For an evaluation: the same sizes, but no shape so far."""
        copied = copy(self)
        copied.by_size = {}
        return copied

    def of(self, batch: Batch, name: str) -> Shape:
        """The shape of a batch's microbatches, the same on all ranks; collective, unless it is known, or may be any.

        Stop, or UsageError on a rank that reads such a microbatch, if shapes differ or one is not allowed.
        `name`: of the batch, for the message.
        """
        if self.any:
            return ()
        own = {microbatch.shape for microbatch in batch.microbatches.values()}
        if not self.buckets and self.by_size:
            expected = self.by_size[None]
            for shape in own - {expected}:
                advice = f"{SMALLER}, or declare sizes with buckets=" if batch.loader is None else "say buckets="
                sentence = f"{_has(name, shape)}, not {_words(expected)} as the first: {advice}"
                if batch.loader is None or self.comm.size == 1:  # all ranks have this batch
                    raise Stop(sentence)
                raise UsageError(sentence)
            return expected
        shapes = sorted(set().union(*self.comm.allgather(own)), key=repr)
        shape = shapes[0]
        if len(shapes) > 1:
            words = " and ".join(map(_words, shapes))
            raise Stop(f"the microbatches of {name} have shapes {words}: all of one step must have the same")
        size = next((size[1] for _, size in shape if size and len(size) > 1), None) if self.buckets else None
        if self.buckets and size not in self.buckets:
            raise Stop(f"{_has(name, shape)}, not one of buckets={self.buckets}")
        expected = self.by_size.setdefault(size, shape)
        if shape != expected:
            raise Stop(f"{_has(name, shape)}, but before they had {_words(expected)} for size {size}")
        return shape


def check_loss_weight(given: object, model: Model, header: Header) -> None:
    """UsageError if `loss_weight` is no function, or a microbatch's loss has the same weight in every step."""
    if given is not None and not callable(given):
        raise UsageError(f"loss_weight should be a function of a target, not {given!r}")
    if given is not None and not header.has_flush:
        raise UsageError("loss_weight: this schedule updates stages one by one, by one microbatch at a time")
    if given is not None and model.loss_of == "minibatch":
        raise UsageError("loss_weight: the loss is of the whole minibatch, so its microbatches have no weights")


def _words(shape: Shape) -> str:
    return ", ".join(f"{name} {size or ''}".strip() for name, size in shape)


def _has(name: str, shape: Shape) -> str:
    return f"the microbatches of {name} have shape {_words(shape)}"
