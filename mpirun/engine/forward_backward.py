"""The jobs of a rank, FWD, RECOMPUTE, BWD, BWD_I and BWD_W: each prepared once as an act that knows its operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch
from mpirun.engine.act import Act
from mpirun.engine.context import Context
from mpirun.engine.forward import Forward, PendingBackward, Score
from mpirun.engine.job_graphs import Job, JobGraphs
from mpirun.engine.loss import MinibatchLoss, loss_gradient
from mpirun.engine.microbatch_reader import MicrobatchReader
from mpirun.engine.running_statistics import naming_buffers
from mpirun.engine.stage import LocalStage
from mpirun.engine.stage_gradients import gradient_giver, gradient_taker, output_gradients
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.dataflow import Bundle, TensorSpec
from mpirun.model.loss import check_derivatives, loss_and_metrics, loss_input
from mpirun.model.rng import LOSS, derived_seed
from schedgen.ir.instructions import Instruction, Kind, Op


class ForwardBackward:
    """Prepares the jobs. Each method takes the row of an instruction and the instruction, and returns the act."""

    def __init__(self, context: Context, versions: StageVersions, graphs: JobGraphs | None = None) -> None:
        """`versions`: of the stages' weights; `graphs`: captures and replays jobs; None: no job is captured."""
        self.context, self.versions, self.buffers, self.graphs = context, versions, context.buffers, graphs
        header, setup = context.header, context.setup
        self.header, self.setup, self.position, self.dataflows = header, setup, context.position, setup.dataflows
        self.device = setup.device.torch
        self.pending: dict[tuple[int, int], PendingBackward] = {}  # by stage and microbatch
        self.microbatches = MicrobatchReader(setup, context.position, header.microbatches)
        kind, dtype = setup.device.kind, setup.autocast_dtype
        self.minibatch_loss = MinibatchLoss(setup.model, header.microbatches, kind, dtype)
        self.losses: dict[int, Tensor] = {}  # by microbatch, since the last NORM
        self.metrics: dict[int, dict[str, Tensor]] = {}  # by microbatch, since the last NORM
        self.saves = {(i.stage, i.mb) for i in context.instructions if i.op in (Op.BWD, Op.BWD_I)}
        self.redone = {(i.stage, i.mb) for i in context.instructions if i.op == Op.RECOMPUTE}
        self.saves -= self.redone

    def forget_pass(self) -> None:
        """Drop what an interrupted pass has kept: the next pass may have other data."""
        self.microbatches.forget()
        for kept in (self.losses, self.metrics, self.minibatch_loss.collected):
            kept.clear()

    # Forward

    def fwd(self, row: int, i: Instruction) -> Act:
        """FWD: compute a stage's outputs and put them into x, one per consumer if consumers read different outputs."""
        put = self._collector(i) if self.has_minibatch_loss(i) else self._put_outputs(i)
        return Forward(self, i, (i.stage, i.mb) in self.saves, put)

    def recompute(self, row: int, i: Instruction) -> Act:
        """RECOMPUTE: run the forward again, only for what its backward needs."""
        return Forward(self, i, True, lambda outputs: None)

    def _put_outputs(self, i: Instruction) -> Callable[[list[Tensor]], object]:
        """A function that puts a stage's outputs, or its loss, into its buffers x."""
        graph, device = self.header.graph, self.device
        consumers = graph.output_consumers(i.stage)
        buffers = [self.buffers.get(Kind.X, i.stage, i.mb, consumer) for consumer in consumers]
        if graph.consumers[i.stage]:
            bundles = [self.dataflows[i.mb].bundle(Kind.X, i.stage, consumer) for consumer in consumers]
        else:  # the loss
            bundles = [Bundle([0], [TensorSpec((), torch.float32)])]
        if len(bundles) == 1 and bundles[0].indices == (0,):
            (only,) = buffers
            return lambda outputs: setattr(only, "value", outputs[0])

        def put(outputs: list[Tensor]) -> None:
            for buffer, bundle in zip(buffers, bundles, strict=True):
                buffer.value = bundle.pack([outputs[index] for index in bundle.indices], device)

        return put

    def score(self, i: Instruction) -> Score:
        """A function that computes the loss of a microbatch and its metrics."""
        facts, function, rng = self.setup.shapes[-1].loss, self.setup.model.loss, self.stage_of(i).layer_rng
        assert facts is not None  # it is of one microbatch
        draws = facts.draws
        # The usual gradient is cached here, before a step, so that its memory does not count as kept by a forward.
        loss_gradient(torch.float32, self.setup.microbatches.count if self.header.has_flush else 1, self.device)

        def score(batch: Microbatch, found: dict[str, Tensor], outputs: list[Tensor]) -> Tensor:
            if draws:
                rng.begin(LOSS)
            try:
                loss, metrics = loss_and_metrics(function, loss_input(outputs), batch)
            except RuntimeError as error:
                check_derivatives(error)
                raise
            if not loss.requires_grad:
                raise ValueError("the loss has no gradient: it depends on no parameter")
            found |= metrics
            return loss

        return score

    def has_minibatch_loss(self, i: Instruction) -> bool:
        """Whether the job's stage is the last, and the loss is of the whole minibatch."""
        return self.setup.model.loss_of == "minibatch" and not self.header.graph.consumers[i.stage]

    def _collector(self, i: Instruction) -> Callable[[list[Tensor]], object]:
        """A function that collects the last stage's outputs for a loss of the whole minibatch."""
        x, read, mb = self.buffers.get(Kind.X, i.stage, i.mb), self.microbatches.reader(i.mb, keep=False), i.mb
        setup, count = self.setup, self.header.microbatches

        def collect(outputs: list[Tensor]) -> None:
            x.value = outputs
            if len(self.minibatch_loss.collected) == count - 1:
                setup.device.seed(derived_seed(setup.seed, self.position.step, LOSS))
            self.losses |= self.minibatch_loss.add_outputs(mb, outputs, read())

        return collect

    # Backward

    def bwd(self, row: int, i: Instruction) -> Act:
        """BWD: the gradients of the inputs go into buffers g, those of the weights are added to dw."""
        stage, pending, take_gradients = self.stage_of(i), self.pending_of(i), gradient_taker(self.context, i)
        gradient, key = self.context.grad_buffers.of_stage(i.stage), self.context.slots.row_key(i.mb)

        def compute(gradients: list[Tensor | None]) -> list[Tensor]:
            saved = pending.saved
            gradient.attach(key, stage)
            stage.backward(saved, gradients)
            del pending.saved
            return take_gradients(saved)

        return self._backward(i, compute)

    def bwd_i(self, row: int, i: Instruction) -> Act:
        """BWD_I: the gradients of the inputs only; `pending.half` keeps what BWD_W needs."""
        stage, pending, take_gradients = self.stage_of(i), self.pending_of(i), gradient_taker(self.context, i)

        def compute(gradients: list[Tensor | None]) -> list[Tensor]:
            saved = pending.saved
            pending.half = stage.backward_input(saved, gradients)
            del pending.saved
            return take_gradients(saved)

        return self._backward(i, compute)

    def bwd_w(self, row: int, i: Instruction) -> Act:
        """BWD_W: the gradients of the weights, added to dw."""
        stage, pending, weights = self.stage_of(i), self.pending_of(i), self.wait_for_weights(i)
        gradient, key = self.context.grad_buffers.of_stage(i.stage), self.context.slots.row_key(i.mb)

        def compute() -> None:
            gradient.attach(key, stage)
            stage.backward_weight(pending.half)
            del pending.half

        run = self.job(i, compute)

        def act() -> None:
            if weights is not None:
                weights()
            run()

        return act

    def _backward(self, i: Instruction, compute: Callable[[list[Tensor | None]], list[Tensor]]) -> Act:
        """BWD or BWD_I; `compute`: computes the gradients of the inputs from those of the outputs."""
        run, weights = self.job(i, compute), self.wait_for_weights(i)
        given, give = self._output_gradients(i), gradient_giver(self.context, i)

        def act() -> None:
            gradients = given()
            if weights is not None:
                weights()
            give(run(gradients))

        return act

    def _output_gradients(self, i: Instruction) -> Callable[[], list[Tensor | None]]:
        """A function that returns the gradients of the stage's outputs."""
        if self.has_minibatch_loss(i):
            return lambda: self.minibatch_loss.take_gradients(i.mb)
        if self.header.graph.consumers[i.stage]:
            return output_gradients(self.context, i)
        pending = self.pending_of(i)
        return lambda: [pending.loss_gradient]

    # Forward and backward

    def job(self, i: Instruction, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute` itself, or a `Job` that captures it as a graph and replays the graph."""
        stage = self.stage_of(i)
        run = compute if self.graphs is None else Job(self.graphs, i, stage.layer_rng, compute)
        return partial(naming_buffers, stage, run) if stage.shape.overwrites_buffers else run

    def stage_of(self, i: Instruction) -> LocalStage:
        """The stage, with the version of its weights that the instruction names."""
        return self.versions.at(i.stage, i.version) if i.version >= 0 else self.context.stages[i.stage]

    def wait_for_weights(self, i: Instruction) -> Callable[[], object] | None:
        """A function that waits until all shards of the stage's weights have arrived; None: they are never fetched."""
        if i.stage not in self.context.slots.fetched:
            return None
        shards = [self.buffers.get(Kind.W, i.stage, piece=shard) for shard in self.context.stages[i.stage].shard_spans]
        return partial(self.buffers.wait_values, shards)

    def pending_of(self, i: Instruction) -> PendingBackward:
        """What jobs of the same stage and microbatch keep for later ones."""
        return self.pending.setdefault((i.stage, i.mb), PendingBackward())
