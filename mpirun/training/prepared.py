"""A run's stages, and an interpreter and an evaluator for each shape of microbatches.

A shape is that of a microbatch's input; there is one in a run, or one for each declared size (`batches.py`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint.pretrained import check_weights
from mpirun.comm.fail_together import Stop, on_rank_0
from mpirun.comm.output import note
from mpirun.data.dataset_loaders import StreamLoader
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch, MicrobatchSource, Shape, tokens
from mpirun.data.values import by_path
from mpirun.engine.build import RunInterpreter
from mpirun.engine.options import RunOptions, SetupOptions, values_of
from mpirun.engine.recipe import Recipe
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Host, Setup, set_up
from mpirun.model.contract import Model
from mpirun.model.loss import loss_input, why_uncut
from mpirun.training.batches import LossWeight, Shapes, StepBatches, loss_weights, shares
from mpirun.training.evaluation import Evaluator
from mpirun.training.profile import Copies, Profile
from mpirun.training.saving import Checkpoints
from mpirun.training.session import Session
from mpirun.watchdog import SETTING_UP
from schedgen.ir.header import Header
from schedgen.ir.instructions import F
from schedgen.util.errors import clip, listed


class OfShape(NamedTuple):
    """What a run needs to train on microbatches of one shape."""

    interpreter: RunInterpreter
    tokens: int  # elements of the target per sample
    why_uncut: str | None  # why padding cannot be removed from a microbatch; None: it can
    example: Microbatch


class Prepared:
    """A run's stages, its interpreters and evaluators. Every method is collective."""

    def __init__(
        self,
        session: Session,
        model: Model,
        options: RunOptions,
        recipe: Recipe,
        host: Host,
        source: MicrobatchSource,
        shapes: Shapes,
        weigh: LossWeight | None,
    ) -> None:
        """Build the stages for the microbatches of `source`.

        `shapes`: of the steps' microbatches; `weigh`: an Engine's loss_weight.
        """
        self.session, self.source, self.shapes, self.weigh = session, source, shapes, weigh
        self.model, self._set_up = model, partial(set_up, session.comm, options=options, recipe=recipe, host=host)
        self.measured = RunOptions(**values_of(options, SetupOptions))  # what a profile has of the options
        with session.watchdog.phase(SETTING_UP):
            for sentence in on_rank_0(session.comm, lambda: check_weights(model)) or ():
                note(session.comm, sentence)
            setup = self._set_up(session.header, model, source)
            example = source.example
            count = source.count
            self._own = [1 / count] * count, count * example.size, count * tokens(example)
            session.build(setup)
        note_state(session.comm, setup, session.header, source.count)
        # Why padding cannot be removed from outputs, where they are the same in training and in evaluation.
        self.why_uncut = _why_uncut(setup, example, scores=False) if model.origin.traced else None
        self.labels_are_checked = weigh is not None or model.loss_of == "minibatch" or source.count == 1
        self.names = example.names  # of every microbatch's input
        self.of_shape: dict[Shape, OfShape] = {}
        if isinstance(source, StepBatches):
            self.of_shape[() if shapes.any else example.shape] = _of_shape(session.interpreter, setup, example)
        self.evaluators: dict[Shape, Evaluator] = {}
        self.checkpoints = Checkpoints(session)

    def take(self, batch: Batch | None) -> tuple[list[float], int, int]:
        """Take the next step's batch; returns its losses' weights in the step's, its samples, elements of its targets.

        None: the model makes the microbatches itself.
        """
        session, source = self.session, self.source
        if not isinstance(source, StepBatches):
            if batch is not None:
                raise Stop("the model makes the run's microbatches itself: give example=, or make the loader first")
            return self._own
        if batch is None:
            raise Stop("step: give a batch")
        if session.verifies and isinstance(batch.loader, StreamLoader):
            raise Stop("verify=True does all steps again, but an IterableDataset is read once: train without it")
        of_shape = self.use(batch, self.shapes.of(batch, f"step {session.steps + 1}"))
        size, own = of_shape.example.size, batch.microbatches.values()
        is_padded = min(batch.samples) < (max(batch.samples) if self.shapes.any else size)
        if is_padded and not session.header.has_flush:  # a padded microbatch would count as much as the others
            raise Stop('this schedule updates stages one by one, so no microbatch may be padded: last="drop"')
        weights = None if self.weigh is None else loss_weights(self.weigh, batch, session.comm)
        if not self.labels_are_checked:
            note_ignored_labels(session.comm, batch)
            self.labels_are_checked = True
        source.give(session.steps, batch, session.verifies, weights)
        samples = sum(batch.samples)
        count = samples * of_shape.tokens
        if self.shapes.any:
            count = sum(tokens(microbatch) for microbatch in own if microbatch.padding < microbatch.size)
            count = count if batch.loader is None else session.comm.allreduce(count)
        return shares(batch.samples if weights is None else weights), samples, count

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
            example = self._example(batch)
            setup = self._set_up(self.session.header, self.model, StepBatches(example, self.source.count))
            made = self.session.add_interpreter(replace(setup, microbatches=self.source))
            self.of_shape[shape] = _of_shape(made, setup, example)
        of_shape = self.of_shape[shape]
        pads_in_part = batch.loader is not None and batch.loader.pads_in_part
        if (pads_in_part or batch.is_padded_in_part) and of_shape.why_uncut is not None:
            raise Stop(of_shape.why_uncut)
        self.session.use(of_shape.interpreter)
        return of_shape

    def evaluator(self, batch: Batch, shape: Shape, padded: bool, scores: bool) -> Evaluator:
        """The evaluator of microbatches of this shape; `scores`: their targets are used, too.

        Stop if a microbatch will be `padded` in part, and the padding could not be removed.
        """
        if shape not in self.evaluators:
            seen = self.of_shape.get(shape)
            example = self._example(batch) if seen is None else seen.example
            self.evaluators[shape] = Evaluator(self.session, example, self._set_up)
        evaluator = self.evaluators[shape]
        padded = padded or batch.is_padded_in_part
        if padded and (why := _why_uncut(evaluator.setup, evaluator.batches.example, scores)) is not None:
            raise Stop(why)
        return evaluator

    def _example(self, batch: Batch) -> Microbatch:
        """A microbatch of a new shape; Stop if its input has leaves of other names than the run's first."""
        example = first_microbatch(self.session.comm, batch)
        if example.names != self.names:
            has, had = (clip(", ".join(names)) for names in (example.names, self.names))
            raise Stop(f"the input of a microbatch has {has}, but that of the first had {had}")
        return example

    def profile(self, path: str, steps: int) -> None:
        """Write a profile of the stages to a file; Stop if no step would be timed."""
        session, source = self.session, self.source
        if steps < 1:
            raise Stop(f"profile: nothing is measured in {steps} steps")
        for stage in session.interpreter.stages.values():
            stage.give_back()  # before the first step, too, modules have values, which are copied
        session.setup.device.use_words(ready=False)  # until the next step: a profile allocates memory
        source = Copies(source.example) if isinstance(source, StepBatches) else source
        set_up = partial(self._set_up, source=source, options=self.measured)
        profile = Profile(session.comm, self.model, session.header, set_up, ("profile", path))
        profile.beat = session.beat
        profile.write(steps)

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


def _of_shape(interpreter: RunInterpreter, setup: Setup, example: Microbatch) -> OfShape:
    return OfShape(interpreter, tokens(example) // max(1, example.size), _why_uncut(setup, example, True), example)


def _why_uncut(setup: Setup, example: Microbatch, scores: bool) -> str | None:
    """Why padding cannot be removed from the output and, if `scores`, the target of a microbatch; None: it can."""
    rebuild = setup.model.origin.rebuild
    output = loss_input([torch.empty(spec.size, device="meta") for spec in setup.shapes[-1].outputs])
    why = why_uncut("output", output if rebuild is None else rebuild(output), example.size)
    return why or (why_uncut("target", example.target, example.size) if scores else None)


def note_state(comm: MPI.Intracomm, setup: Setup, header: Header, microbatches: int) -> None:
    """Name the buffers that go from one microbatch of a step to the next, and whose values evaluations use."""
    changed = dict.fromkeys(
        f"{n} of stage {shape.model_stage}" for shape in setup.shapes for n in shape.changed_buffers
    )
    if not changed or microbatches == 1:
        return
    stages = [s for s, shape in enumerate(setup.shapes) if shape.changed_buffers]
    ranks = {statistics_rank(header, s) for s in stages if len({*header.compute[F, s].tolist()}) > 1}
    whose = f"; evaluation uses those of rank {listed([*map(str, sorted(ranks))])}" if ranks else ""
    note(
        comm,
        f"forwards change buffers from microbatch to microbatch, as BatchNorm does: {listed(changed)}: outputs may "
        f"differ from the whole batch at once{whose}",
    )


def note_ignored_labels(comm: MPI.Intracomm, batch: Batch) -> None:
    """Say that targets have labels that torch's cross_entropy ignores, if they do. Collective."""
    leaves = [
        leaf
        for microbatch in batch.microbatches.values()
        for path, leaf in by_path(microbatch.target).items()
        if not isinstance(microbatch.target, Mapping) or "label" in path  # a mapping has the input, too
    ]
    own = any(isinstance(x, Tensor) and x.dtype == torch.int64 and bool((x == -100).any()) for x in leaves)
    if any(comm.allgather(own)):
        note(
            comm,
            "targets have labels of -100, which cross_entropy ignores: microbatches count by their samples, not by "
            "their other labels, unless loss_weight counts these",
        )
