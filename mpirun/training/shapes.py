"""Which shapes microbatches have: one in a run, or one for each size that is declared (`buckets`).

The size is that of dimension 1 of the input's first tensor that has one: the sequence length, say. Without declared
sizes each rank checks only what it reads itself, from the second step on; with them all ranks agree before each step.
Some schedules and losses allow one shape only, or no padding: the checks are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from mpi4py import MPI

from mpirun.comm.fail_together import Stop
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Shape
from mpirun.model.contract import Model
from mpirun.model.split.module_io import bucket_sizes
from mpirun.training.batches import SMALLER
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


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


def check_padding(header: Header) -> None:
    """Stop if a microbatch with padding would count as much as the others."""
    if not header.has_flush:
        raise Stop('this schedule updates stages one by one, so no microbatch may be padded: last="drop"')


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
