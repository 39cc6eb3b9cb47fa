"""What a run prepares when it sees data: its stages first, then an interpreter and an evaluator for each shape.

A shape is that of a microbatch's input; there is one in a run, or one for each declared size (`shapes.py`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from mpirun.checkpoint.disk_format import Manifest
from mpirun.comm.fail_together import Stop, on_rank_0, together
from mpirun.comm.output import print_notes
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch, Shape, tokens
from mpirun.engine.first_step import RunInterpreter
from mpirun.engine.host import Host
from mpirun.engine.setup import Setup, StepOptions, set_up
from mpirun.model.check_weights import check_weights
from mpirun.model.contract import Model
from mpirun.model.dataflow import TensorSpec
from mpirun.model.loss import loss_input, why_uncut
from mpirun.training.batches import LossWeight, StepBatches, loss_weight
from mpirun.training.evaluation import Evaluator
from mpirun.training.session import Session
from schedgen.util.errors import MpirunWarning, UsageError


class OfShape(NamedTuple):
    """What a run needs to train on microbatches of one shape."""

    interpreter: RunInterpreter
    tokens: int  # elements of the target per sample
    why_uncut: Callable[[], str | None]  # why padding cannot be removed from a microbatch; None: it can. Collective
    example: Microbatch


class Prepared:
    """A run's interpreters and evaluators, by the shape of microbatches. Every method is collective."""

    def __init__(
        self,
        session: Session,
        model: Model,
        options: StepOptions,
        host: Host,
        verifies: bool,
        weigh: LossWeight | None,
    ) -> None:
        """`verifies`: the steps are recorded, to be verified; `weigh`: an Engine's `loss_weight`."""
        self.session, self.model, self.options, self.host, self.verifies = session, model, options, host, verifies
        self.weigh = weigh
        self.count = session.header.microbatches * options.passes  # microbatches of a step
        self.resumed: Manifest | None = None  # the checkpoint to resume from, as soon as the stages are built
        self.of_shape: dict[Shape, OfShape] = {}
        self.evaluators: dict[Shape, Evaluator] = {}
        self.batches: StepBatches  # of the steps
        self.names: tuple[str, ...] | None = None  # of the run's first input

    @property
    def has_stages(self) -> bool:
        """Whether the stages are built."""
        return bool(self.of_shape)

    def check_names(self, batch: Batch) -> None:
        """UsageError if an input has other names than the run's first; Stop if all ranks have this batch."""
        found = [microbatch.names for microbatch in batch.microbatches.values()]
        if self.names is None:
            self.names = next(chain.from_iterable(self.session.comm.allgather(found[:1])), ())
        try:
            for microbatch in batch.microbatches.values():
                microbatch.check_names(self.names)
        except UsageError as error:
            if batch.loader is None:
                raise Stop(str(error)) from None
            raise

    def use(self, batch: Batch, shape: Shape) -> OfShape:
        """Make the session step with the interpreter of this shape.

        Stop if the loader will pad a microbatch in part, and the padding could not be removed.
        """
        if not self.has_stages:
            self.build(batch, shape)
        if shape not in self.of_shape:
            if not self.session.header.has_flush:
                raise Stop(
                    "with weight versions there is one shape: the first batch evaluated should have that of the steps"
                )
            example = self._example(batch)
            with print_notes(self.session.comm):
                setup = set_up(
                    self.session.comm, self.session.header, self.model, StepBatches(example, self.count),
                    self.options, self.host,
                )  # fmt: skip
                made = self.session.add_interpreter(replace(setup, microbatches=self.batches))
            self.of_shape[shape] = _of_shape(made, setup, example)
        of_shape = self.of_shape[shape]
        pads_in_part = batch.loader is not None and batch.loader.pads_in_part
        if (pads_in_part or batch.is_padded_in_part) and (why := of_shape.why_uncut()) is not None:
            raise Stop(why)
        self.session.use(of_shape.interpreter)
        return of_shape

    def evaluator(self, batch: Batch, shape: Shape, padded: bool, scores: bool) -> Evaluator:
        """The evaluator of microbatches of this shape; `scores`: their targets are used, too.

        Stop if a microbatch will be `padded` in part, and the padding could not be removed.
        """
        if not self.has_stages:
            self.build(batch, shape)
        if shape not in self.evaluators:
            example = self.of_shape[shape].example if shape in self.of_shape else self._example(batch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MpirunWarning)  # building the stages has warned of the same
                self.evaluators[shape] = Evaluator(self.session, example, self.options, self.host)
        evaluator = self.evaluators[shape]
        padded = padded or batch.is_padded_in_part
        if padded and (why := _why_uncut(evaluator.setup, evaluator.batches.example, scores)) is not None:
            raise Stop(why)
        return evaluator

    def build(self, batch: Batch, shape: Shape) -> None:
        """Build the stages, now that a microbatch's shape is known, and resume from a checkpoint if there is one."""
        session, example = self.session, self._example(batch)
        self.batches = StepBatches(example, self.count)
        with print_notes(session.comm):
            on_rank_0(session.comm, lambda: check_weights(self.model))
            setup = set_up(session.comm, session.header, self.model, self.batches, self.options, self.host)
            session.build(setup, self.verifies, self.resumed is not None)
        self.of_shape[shape] = _of_shape(session.interpreter, setup, example)
        session.sigterm.take()
        if self.resumed is not None:
            session.resume(self.resumed)

    def resume(self, manifest: Manifest) -> None:
        """Resume from this checkpoint: now, or as soon as the stages are built."""
        if self.has_stages:
            self.session.resume(manifest)
        else:
            self.resumed, self.session.steps = manifest, manifest.step

    def free(self) -> None:
        """Free the MPI resources of all interpreters and evaluators."""
        for evaluator in self.evaluators.values():
            evaluator.list.transport.free()
        if self.has_stages:
            self.session.free()

    def _example(self, batch: Batch) -> Microbatch:
        """A microbatch of the batch, the same on all ranks: one that counts, with the most samples without padding."""
        comm, saved, weigh = self.session.comm, io.BytesIO(), self.weigh

        def use(microbatch: Microbatch | None) -> tuple[bool, int]:
            if microbatch is None:
                return False, -1
            return weigh is None or loss_weight(weigh, microbatch) > 0, _real(microbatch)

        own = together(comm, lambda: max([None, *batch.microbatches.values()], key=use))
        uses = comm.allgather(use(own))
        root = uses.index(max(uses))
        if comm.rank == root:
            torch.save(own, saved)  # pickle does not know all types
        return torch.load(io.BytesIO(comm.bcast(saved.getvalue(), root)), weights_only=False)


def _real(microbatch: Microbatch) -> int:
    """The number of a microbatch's samples without padding."""
    return microbatch.size - microbatch.padding


def _of_shape(interpreter: RunInterpreter, setup: Setup, example: Microbatch) -> OfShape:
    why_uncut = cache(lambda: _why_uncut(setup, example, scores=True))
    return OfShape(interpreter, tokens(example) // max(1, example.size), why_uncut, example)


def _why_uncut(setup: Setup, example: Microbatch, scores: bool) -> str | None:
    """Why padding cannot be removed from the output and, if `scores`, the target of a microbatch; None: it can.

    Collective.
    """
    size, rebuild = example.size, setup.model.origin.rebuild

    def output(specs: Sequence[TensorSpec]) -> Any:
        made = loss_input([torch.empty(spec.size, device="meta") for spec in specs])
        return made if rebuild is None else rebuild(made)

    outputs = output(setup.shapes[-1].outputs)
    why = why_uncut("output", outputs, size) or (why_uncut("target", example.target, size) if scores else None)
    if why is None and (one_more := setup.outputs_of_one_more()) is not None:
        why = why_uncut("output", outputs, size, output(one_more))
    return why
