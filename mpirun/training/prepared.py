"""A run's stages, and an interpreter and an evaluator for each shape of microbatches.

A shape is that of a microbatch's input; there is one in a run, or one for each declared size (`shapes.py`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.fail_together import Stop, on_rank_0
from mpirun.comm.output import print_notes
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch, MicrobatchSource, Shape, tokens
from mpirun.engine.host import Host
from mpirun.engine.interpreter import Interpreter
from mpirun.engine.setup import Setup, StepOptions, set_up
from mpirun.model.check_weights import check_weights
from mpirun.model.contract import Model
from mpirun.model.dataflow import TensorSpec
from mpirun.model.loss import loss_input, why_uncut
from mpirun.training.batches import StepBatches
from mpirun.training.evaluation import Evaluator
from mpirun.training.saving import Checkpoints
from mpirun.training.session import Session
from mpirun.watchdog import SETTING_UP
from schedgen.util.errors import MpirunWarning


class OfShape(NamedTuple):
    """What a run needs to train on microbatches of one shape."""

    interpreter: Interpreter
    tokens: int  # elements of the target per sample
    why_uncut: Callable[[], str | None]  # why padding cannot be removed from a microbatch; None: it can. Collective
    example: Microbatch


class Prepared:
    """A run's stages, its interpreters and evaluators. Every method is collective."""

    def __init__(
        self,
        session: Session,
        model: Model,
        options: StepOptions,
        host: Host,
        source: MicrobatchSource,
        text: Tensor | None = None,
    ) -> None:
        """Build the stages for the microbatches of `source`; `text`: what the model makes them from, if it does."""
        self.session, self.model, self.options, self.host, self.source = session, model, options, host, source
        with session.watchdog.phase(SETTING_UP), print_notes(session.comm):
            on_rank_0(session.comm, lambda: check_weights(model))
            setup = set_up(session.comm, session.header, model, source, options, host, text)
            session.build(setup)
        example = source.examples()[0]
        self.names = example.names  # of every microbatch's input
        self.of_shape = {example.shape: _of_shape(session.interpreter, setup, example)}
        self.evaluators: dict[Shape, Evaluator] = {}
        self.checkpoints = Checkpoints(session)

    def use(self, batch: Batch, shape: Shape) -> OfShape:
        """Make the session step with the interpreter of this shape.

        Stop if the loader will pad a microbatch in part, and the padding could not be removed.
        """
        if shape not in self.of_shape:
            if not self.session.header.has_flush:
                raise Stop(
                    "with weight versions there is one shape: that of example=, of the first loader, or of the first "
                    "batch"
                )
            example = first_microbatch(self.session.comm, batch)
            with print_notes(self.session.comm):
                setup = set_up(
                    self.session.comm, self.session.header, self.model, StepBatches(example, self.source.count),
                    self.options, self.host,
                )  # fmt: skip
                made = self.session.add_interpreter(replace(setup, microbatches=self.source))
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
        if shape not in self.evaluators:
            seen = self.of_shape.get(shape)
            example = first_microbatch(self.session.comm, batch) if seen is None else seen.example
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MpirunWarning)  # building the stages has warned of the same
                self.evaluators[shape] = Evaluator(self.session, example, self.options, self.host)
        evaluator = self.evaluators[shape]
        padded = padded or batch.is_padded_in_part
        if padded and (why := _why_uncut(evaluator.setup, evaluator.batches.example, scores)) is not None:
            raise Stop(why)
        return evaluator

    def free(self) -> None:
        """Free the MPI resources of all interpreters and evaluators."""
        for evaluator in self.evaluators.values():
            evaluator.list.transport.free()
        self.session.free()


def first_microbatch(comm: MPI.Intracomm, batch: Batch) -> Microbatch:
    """The first microbatch of a batch, which not all ranks may have, on all ranks. Collective."""
    firsts = comm.allgather(min(batch.microbatches, default=len(batch.samples)))
    root = firsts.index(min(firsts))
    return shared(comm, batch.microbatches[firsts[root]] if comm.rank == root else None, root)


def shared(comm: MPI.Intracomm, microbatch: Microbatch | None, root: int = 0) -> Microbatch:
    """The microbatch of rank `root`, on all ranks. Collective."""
    saved = io.BytesIO()
    if comm.rank == root:
        torch.save(microbatch, saved)  # pickle does not know all types
    return torch.load(io.BytesIO(comm.bcast(saved.getvalue(), root)), weights_only=False)


def _of_shape(interpreter: Interpreter, setup: Setup, example: Microbatch) -> OfShape:
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
