"""FWD, RECOMPUTE, BWD, BWD_I and BWD_W: the jobs of a rank, each prepared once as an act that knows its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch
from mpirun.engine.act import Act
from mpirun.engine.context import Context
from mpirun.engine.job_graphs import Job, JobGraphs
from mpirun.engine.loss import MinibatchLoss, loss_gradient
from mpirun.engine.microbatch_reader import MicrobatchReader
from mpirun.engine.running_statistics import naming_buffers
from mpirun.engine.split_backward import WeightHalf
from mpirun.engine.stage import LocalStage, SavedForward
from mpirun.engine.stage_gradients import gradient_giver, gradient_taker, output_gradients
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.dataflow import Bundle, TensorSpec
from mpirun.model.frozen_statistics import buffer_copies, frozen_statistics
from mpirun.model.loss import check_derivatives, loss_and_metrics, loss_input
from mpirun.model.rng import LOSS, derived_seed
from schedgen.ir.instructions import Instruction, Kind, Op

# Computes the loss of a microbatch from the last stage's outputs, and puts its metrics into the dict.
Score = Callable[[Microbatch, dict[str, Tensor], list[Tensor]], Tensor]


class PendingBackward:
    """What a forward, or the first half of a backward, keeps for later jobs of the same stage and microbatch."""

    __slots__ = ("buffers", "half", "loss_gradient", "saved")
    buffers: dict[str, Tensor]  # if forwards change some: their values before a forward that is recomputed
    saved: SavedForward
    half: WeightHalf | None
    loss_gradient: Tensor  # last stage only: the gradient that its backward starts from


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
        forward = self._forward(i, (i.stage, i.mb) in self.saves)
        if self._has_minibatch_loss(i):
            return self._collect_outputs(i, forward)
        graph = self.header.graph
        consumers = graph.output_consumers(i.stage)
        buffers = [self.buffers.get(Kind.X, i.stage, i.mb, consumer) for consumer in consumers]
        if not graph.consumers[i.stage]:  # the loss
            bundles = [Bundle([0], [TensorSpec((), torch.float32)])]
        else:
            bundles = [self.dataflows[i.mb].bundle(Kind.X, i.stage, consumer) for consumer in consumers]
        if len(bundles) == 1 and bundles[0].indices == (0,):
            (buffer,) = buffers

            def act() -> None:
                buffer.value = forward()[0]

            return act

        device = self.device

        def act_with_bundles() -> None:
            outputs = forward()
            for buffer, bundle in zip(buffers, bundles, strict=True):
                buffer.value = bundle.pack([outputs[index] for index in bundle.indices], device)

        return act_with_bundles

    def recompute(self, row: int, i: Instruction) -> Act:
        """RECOMPUTE: run the forward again, only for what its backward needs."""
        return self._forward(i, save=True)

    def _forward(self, i: Instruction, save: bool) -> Callable[[], list[Tensor]]:
        """A function that computes the outputs of a forward job and, if `save`, keeps what its backward needs."""
        stage, weights, pending, mb = self.stage_of(i), self._wait_for_weights(i), self._pending(i), i.mb
        header, graph, dataflow = self.header, self.header.graph, self.dataflows[i.mb]
        producers = graph.producers[i.stage]
        inputs = [self.buffers.get(Kind.X, p, mb, graph.output_consumer(p, i.stage)) for p in producers]
        bundles = [dataflow.x(p, i.stage) for p in producers]
        packed = any(len(bundle.indices) != 1 for bundle in bundles)
        arguments, specs = dataflow.arguments(i.stage), dataflow.outputs[i.stage]
        has_loss = not graph.consumers[i.stage] and not self._has_minibatch_loss(i)
        read = self.microbatches.reader(mb, save) if arguments.reads_input or has_loss else None
        score = self._score(i) if has_loss else None
        records = has_loss and i.op == Op.FWD and header.is_first_shard(i.stage)
        wait_value, position, seed, device = self.buffers.wait_value, self.position, self.setup.seed, self.device
        facts = stage.shape.loss if has_loss else None
        has_flush, loss_draws, rng = header.has_flush, facts is not None and facts.draws, stage.layer_rng
        losses, metrics, microbatches = self.losses, self.metrics, header.microbatches

        def compute(
            values: list[Tensor], leaves: Sequence[Any], batch: Microbatch | None
        ) -> tuple[list[Tensor], dict[str, Tensor]]:
            found: dict[str, Tensor] = {}
            loss = None if score is None or batch is None else partial(score, batch, found)
            outputs, saved = stage.forward(values, loss, save, arguments, leaves, specs)
            if saved is not None:
                pending.saved = saved
            return outputs, found

        statistics = stage.shape.overwrites_buffers
        keeps_buffers = statistics and (i.stage, mb) in self.redone
        run = self._with_buffers(i, compute) if keeps_buffers else self._job(i, compute)

        def forward() -> list[Tensor]:
            if weights is not None:
                weights()
            values = [x.value if x.arriving is None else wait_value(x) for x in inputs]
            if packed:
                values = [x for message, bundle in zip(values, bundles, strict=True) for x in bundle.unpack(message)]
            batch = None if read is None else read()
            if rng.layers or loss_draws:
                rng.at = (seed, position.step, position.accumulation_pass * microbatches + mb)
            leaves = batch.leaves if batch is not None and arguments.reads_input else ()
            # A captured job has no use for the divisor, which may be another in every step.
            scored = batch._replace(leaves=[], loss_divisor=1) if batch is not None and has_loss else None
            outputs, found = run(values, leaves, scored)
            if records:
                losses[mb] = outputs[0]
                if batch is not None and (batch.padding < batch.size or not batch.size):  # else it is all padding
                    metrics[mb] = found
            if save and scored is not None and batch is not None:
                divisor = batch.loss_divisor if has_flush else 1  # without a flush STEP divides
                pending.loss_gradient = loss_gradient(outputs[0].dtype, divisor, device)
            return outputs

        return forward

    def _with_buffers(self, i: Instruction, compute: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        """`compute` for a FWD that is recomputed later, or for its RECOMPUTE, if the stage's forwards change buffers.

        A RECOMPUTE changes no buffers. It reads their values from before the FWD, or their current ones if another rank
        did the FWD.
        """
        module, pending, again = self.stage_of(i).module, self._pending(i), i.op == Op.RECOMPUTE
        pending.buffers = {}

        def compute_with_buffers(before: dict[str, Tensor], *inputs: Any) -> tuple[Any, Any, dict[str, Tensor]]:
            if again:
                with frozen_statistics(module, before):
                    return *compute(*inputs), {}
            kept = buffer_copies(module, every_name=True)
            return *compute(*inputs), kept

        job = self._job(i, compute_with_buffers)

        def run(*inputs: Any) -> tuple[Any, Any]:
            outputs, found, pending.buffers = job(pending.buffers if again else {}, *inputs)
            return outputs, found

        return run

    def _score(self, i: Instruction) -> Score:
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

    def _has_minibatch_loss(self, i: Instruction) -> bool:
        return self.setup.model.loss_of == "minibatch" and not self.header.graph.consumers[i.stage]

    def _collect_outputs(self, i: Instruction, forward: Callable[[], list[Tensor]]) -> Act:
        """The last stage's forward, whose outputs are collected for a loss of the whole minibatch."""
        x, read, mb = self.buffers.get(Kind.X, i.stage, i.mb), self.microbatches.reader(i.mb, keep=False), i.mb
        setup, count = self.setup, self.header.microbatches

        def act() -> None:
            x.value = forward()
            if len(self.minibatch_loss.collected) == count - 1:
                setup.device.seed(derived_seed(setup.seed, self.position.step, LOSS))
            self.losses |= self.minibatch_loss.add_outputs(mb, x.value, read())

        return act

    # Backward

    def bwd(self, row: int, i: Instruction) -> Act:
        """BWD: the gradients of the inputs go into buffers g, those of the weights are added to dw."""
        stage, pending, take_gradients = self.stage_of(i), self._pending(i), gradient_taker(self.context, i)
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
        stage, pending, take_gradients = self.stage_of(i), self._pending(i), gradient_taker(self.context, i)

        def compute(gradients: list[Tensor | None]) -> list[Tensor]:
            saved = pending.saved
            pending.half = stage.backward_input(saved, gradients)
            del pending.saved
            return take_gradients(saved)

        return self._backward(i, compute)

    def bwd_w(self, row: int, i: Instruction) -> Act:
        """BWD_W: the gradients of the weights, added to dw."""
        stage, pending, weights = self.stage_of(i), self._pending(i), self._wait_for_weights(i)
        gradient, key = self.context.grad_buffers.of_stage(i.stage), self.context.slots.row_key(i.mb)

        def compute() -> None:
            gradient.attach(key, stage)
            stage.backward_weight(pending.half)
            del pending.half

        run = self._job(i, compute)

        def act() -> None:
            if weights is not None:
                weights()
            run()

        return act

    def _backward(self, i: Instruction, compute: Callable[[list[Tensor | None]], list[Tensor]]) -> Act:
        """BWD or BWD_I; `compute`: computes the gradients of the inputs from those of the outputs."""
        run, weights = self._job(i, compute), self._wait_for_weights(i)
        given, give = self._output_gradients(i), gradient_giver(self.context, i)

        def act() -> None:
            gradients = given()
            if weights is not None:
                weights()
            give(run(gradients))

        return act

    def _output_gradients(self, i: Instruction) -> Callable[[], list[Tensor | None]]:
        """A function that returns the gradients of the stage's outputs."""
        if self._has_minibatch_loss(i):
            return lambda: self.minibatch_loss.take_gradients(i.mb)
        if self.header.graph.consumers[i.stage]:
            return output_gradients(self.context, i)
        pending = self._pending(i)
        return lambda: [pending.loss_gradient]

    # Forward and backward

    def _job(self, i: Instruction, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute` itself, or a `Job` that captures it as a graph and replays the graph."""
        stage = self.stage_of(i)
        run = compute if self.graphs is None else Job(self.graphs, i, stage.layer_rng, compute)
        return partial(naming_buffers, stage, run) if stage.shape.overwrites_buffers else run

    def stage_of(self, i: Instruction) -> LocalStage:
        """The stage, with the version of its weights that the instruction names."""
        return self.versions.at(i.stage, i.version) if i.version >= 0 else self.context.stages[i.stage]

    def _wait_for_weights(self, i: Instruction) -> Callable[[], object] | None:
        """A function that waits until all parts of the stage's weights have arrived; None: they are never fetched."""
        if i.stage not in self.context.slots.fetched:
            return None
        parts = [self.buffers.get(Kind.W, i.stage, via=part) for part in self.context.stages[i.stage].part_slices]
        return partial(self.buffers.wait_values, parts)

    def _pending(self, i: Instruction) -> PendingBackward:
        return self.pending.setdefault((i.stage, i.mb), PendingBackward())
