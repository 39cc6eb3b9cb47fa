"""FWD, RECOMPUTE, BWD, BWD_I and BWD_W: the jobs of a rank, each prepared once as an act that knows its operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch, digest, to_device
from mpirun.engine.act import Act
from mpirun.engine.context import Context
from mpirun.engine.loss import MinibatchLoss, loss_gradient
from mpirun.engine.split_backward import WeightHalf
from mpirun.engine.stage import LocalStage, LossFunction, SavedForward
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.dataflow import Bundle, TensorSpec
from mpirun.model.frozen_statistics import frozen_statistics
from mpirun.model.loss import loss_and_metrics, loss_input
from schedgen.ir.instructions import Instruction, Kind, Op


class PendingBackward:
    """What a forward, or the first half of a backward, leaves for the jobs of its stage and microbatch that follow."""

    __slots__ = ("half", "loss_gradient", "saved")
    saved: SavedForward
    half: WeightHalf | None
    loss_gradient: Tensor  # of the last stage: what its backward begins with


class ForwardBackward:
    """Prepares the jobs. A method takes the row of an instruction and the instruction, and returns the act."""

    def __init__(self, context: Context, versions: StageVersions) -> None:
        """`versions`: of the stages' weights."""
        self.context, self.versions, self.buffers = context, versions, context.buffers
        header, setup = context.header, context.setup
        self.header, self.setup, self.position, self.dataflows = header, setup, context.position, setup.dataflows
        self.device = setup.device.torch
        self.pending: dict[tuple[int, int], PendingBackward] = {}  # by stage and microbatch
        self.microbatches: dict[int, Microbatch] = {}  # those that are still to be read
        self.last_reader: dict[int, object] = {}  # by microbatch
        kind, dtype = setup.device.kind, setup.autocast_dtype
        self.minibatch_loss = MinibatchLoss(setup.model, header.microbatches, kind, dtype)
        self.losses: dict[int, Tensor] = {}  # by microbatch, since the last NORM
        self.metrics: dict[int, dict[str, Tensor]] = {}  # the same
        self.digests: dict[int, str] | None = None  # by microbatch that is read, where they are asked for
        self.saves = {(i.stage, i.mb) for i in context.instructions if i.op in (Op.BWD, Op.BWD_I)}
        self.saves -= {(i.stage, i.mb) for i in context.instructions if i.op == Op.RECOMPUTE}

    # Forward

    def fwd(self, row: int, i: Instruction) -> Act:
        """FWD: compute a stage's outputs and put them, by consumer where these read different ones, into buffers x."""
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
        """RECOMPUTE: do the forward again, only for what its backward needs."""
        forward, stage = self._forward(i, save=True), self.stage_of(i)
        if not stage.shape.overwrites_buffers:
            return forward

        def act() -> None:
            with frozen_statistics(stage.module):
                forward()

        return act

    def _forward(self, i: Instruction, save: bool) -> Callable[[], list[Tensor]]:
        """What computes the outputs of a forward job, and saves for its backward if `save`."""
        stage, weights, pending, mb = self.stage_of(i), self._wait_for_weights(i), self._pending(i), i.mb
        graph, dataflow = self.header.graph, self.dataflows[i.mb]
        producers = graph.producers[i.stage]
        inputs = [self.buffers.get(Kind.X, p, mb, graph.output_consumer(p, i.stage)) for p in producers]
        bundles = [dataflow.x(p, i.stage) for p in producers]
        packed = any(len(bundle.indices) != 1 for bundle in bundles)
        arguments, specs = dataflow.arguments(i.stage), dataflow.outputs[i.stage]
        read = self._microbatch_reader(mb, save) if arguments.reads_input else None
        has_loss = not graph.consumers[i.stage] and not self._has_minibatch_loss(i)
        loss = self._loss(i, save) if has_loss else None
        wait_value, position, seed = self.buffers.wait_value, self.position, self.setup.seed
        microbatches = self.header.microbatches

        def forward() -> list[Tensor]:
            weights()
            values = [wait_value(x) for x in inputs]
            if packed:
                values = [x for message, bundle in zip(values, bundles, strict=True) for x in bundle.unpack(message)]
            leaves = () if read is None else read().leaves
            stage.layer_rng.at = (seed, position.step, position.accumulation_pass * microbatches + mb)
            outputs, saved = stage.forward(values, loss, save, lambda values: arguments(values, leaves), specs)
            if saved is not None:
                pending.saved = saved
            return outputs

        return forward

    def _loss(self, i: Instruction, save: bool) -> LossFunction:
        """The loss of a microbatch; of several shards, the first records it."""
        mb, losses, all_metrics, names = i.mb, self.losses, self.metrics, self.setup.shapes[-1].metrics
        records = i.op == Op.FWD and i.stage == self.header.tensor_parallel.siblings(i.stage)[0]
        read, pending, function = self._microbatch_reader(mb, save), self._pending(i), self.setup.model.loss
        device, has_versions = self.device, bool(self.header.weight_versions)
        # That of most losses is made here, before a step, so that none counts among what a forward keeps.
        loss_gradient(torch.float32, 1 if has_versions else self.setup.microbatches.count, device)

        def loss_of_outputs(outputs: list[Tensor]) -> Tensor:
            batch = read()
            loss, metrics = loss_and_metrics(function, loss_input(outputs), batch)
            if save:
                if not loss.requires_grad:
                    raise ValueError("the loss has no gradient: it depends on no parameter")
                pending.loss_gradient = loss_gradient(loss.dtype, 1 if has_versions else batch.loss_divisor, device)
            if records:
                if tuple(sorted(metrics)) != names and (batch.padding < batch.size or not batch.size):
                    raise ValueError(
                        f"the loss returned the metrics {sorted(metrics)}, but {list(names)} for the first microbatch"
                    )
                losses[mb], all_metrics[mb] = loss.detach(), metrics
            return loss

        return loss_of_outputs

    def _has_minibatch_loss(self, i: Instruction) -> bool:
        return self.setup.model.loss_of == "minibatch" and not self.header.graph.consumers[i.stage]

    def _collect_outputs(self, i: Instruction, forward: Callable[[], list[Tensor]]) -> Act:
        """The last stage's forward where the loss is of the whole minibatch."""
        x, read, mb = self.buffers.get(Kind.X, i.stage, i.mb), self._microbatch_reader(i.mb, save=False), i.mb

        def act() -> None:
            x.value = forward()
            self.minibatch_loss.add_outputs(mb, x.value, read().target)
            self.losses |= self.minibatch_loss.losses
            self.minibatch_loss.losses = {}

        return act

    def _microbatch_reader(self, mb: int, save: bool) -> Callable[[], Microbatch]:
        """What reads a microbatch, which the first reader makes and the last one forgets.

        If the forward saves nothing for its backward, its reader forgets the microbatch too.
        """
        reader = self.last_reader[mb] = object()

        def read() -> Microbatch:
            if mb not in self.microbatches:
                number = self.position.accumulation_pass * self.header.microbatches + mb
                made = self.setup.microbatches(self.position.step, number)
                if self.digests is not None:
                    self.digests[number] = digest(made)
                self.microbatches[mb] = to_device(made, self.device)
            last = not save or self.last_reader[mb] is reader
            return self.microbatches.pop(mb) if last else self.microbatches[mb]

        return read

    # Backward

    def bwd(self, row: int, i: Instruction) -> Act:
        """BWD: the gradients of the inputs go into buffers g, those of the weights are added to dw."""
        stage, pending, weights = self.stage_of(i), self._pending(i), self._wait_for_weights(i)
        output_gradients, give_gradients = self._output_gradients(i), self._give_gradients(i)
        gradient, key = self.context.grad_buffers.of_stage(i.stage), self.context.slots.row_key(i.mb)

        def act() -> None:
            gradients, saved = output_gradients(), pending.saved
            weights()
            gradient.attach(key, stage)
            stage.backward(saved, gradients)
            del pending.saved
            give_gradients(saved)

        return act

    def bwd_i(self, row: int, i: Instruction) -> Act:
        """BWD_I: the gradients of the inputs only; BWD_W continues with what it leaves."""
        stage, pending, weights = self.stage_of(i), self._pending(i), self._wait_for_weights(i)
        output_gradients, give_gradients = self._output_gradients(i), self._give_gradients(i)

        def act() -> None:
            gradients, saved = output_gradients(), pending.saved
            weights()
            pending.half = stage.backward_input(saved, gradients)
            del pending.saved
            give_gradients(saved)

        return act

    def bwd_w(self, row: int, i: Instruction) -> Act:
        """BWD_W: the gradients of the weights, added to dw."""
        stage, pending, weights = self.stage_of(i), self._pending(i), self._wait_for_weights(i)
        gradient, key = self.context.grad_buffers.of_stage(i.stage), self.context.slots.row_key(i.mb)

        def act() -> None:
            weights()
            gradient.attach(key, stage)
            stage.backward_weight(pending.half)
            del pending.half

        return act

    def _output_gradients(self, i: Instruction) -> Callable[[], list[Tensor | None]]:
        """What gives the gradients of the stage's outputs: the sums of its consumers' g, in their order."""
        graph = self.header.graph
        consumers = graph.consumers[i.stage]
        if self._has_minibatch_loss(i):
            return lambda: self.minibatch_loss.take_gradients(i.mb)
        if not consumers:
            pending = self._pending(i)
            return lambda: [pending.loss_gradient]
        buffers = [self.buffers.get(Kind.G, i.stage, i.mb, graph.gradient_consumer(i.stage, c)) for c in consumers]
        bundles = [self.dataflows[i.mb].g(i.stage, c) for c in consumers]
        wait_value, count = self.buffers.wait_value, len(self.setup.shapes[i.stage].outputs)
        if len(buffers) == count == len(bundles[0].indices) == 1:
            return lambda: [wait_value(buffers[0])]

        def added() -> list[Tensor | None]:
            sums: list[Tensor | None] = [None] * count
            for buffer, bundle in zip(buffers, bundles, strict=True):
                for index, gradient in zip(bundle.indices, bundle.unpack(wait_value(buffer)), strict=True):
                    before = sums[index]
                    sums[index] = gradient if before is None else before + gradient
            return sums

        return added

    def _give_gradients(self, i: Instruction) -> Callable[[SavedForward], None]:
        """What puts the gradients of a job's inputs into the buffers g of its producers."""
        graph, dataflow, device = self.header.graph, self.dataflows[i.mb], self.device
        producers = graph.producers[i.stage]
        buffers = [self.buffers.get(Kind.G, p, i.mb, graph.gradient_consumer(p, i.stage)) for p in producers]
        bundles = [dataflow.g(p, i.stage) for p in producers]
        is_floating_point = [
            dataflow.outputs[p][index].dtype.is_floating_point
            for p in producers
            for index in dataflow.x(p, i.stage).indices
        ]

        def give_gradients(saved: SavedForward) -> None:
            gradients = iter(saved.take_gradients(is_floating_point) if buffers else ())
            for buffer, bundle in zip(buffers, bundles, strict=True):
                buffer.value = bundle.pack(list(itertools.islice(gradients, len(bundle.indices))), device)

        return give_gradients

    # Both

    def stage_of(self, i: Instruction) -> LocalStage:
        """The stage, with the version of its weights that the instruction names."""
        return self.versions.at(i.stage, i.version) if i.version >= 0 else self.context.stages[i.stage]

    def _wait_for_weights(self, i: Instruction) -> Callable[[], object]:
        """What waits until the stage's weights, all parts of them, have arrived."""
        parts = [self.buffers.get(Kind.W, i.stage, via=part) for part in self.header.weight_shards.parts(i.stage)]
        if len(parts) == 1:
            return partial(self.buffers.wait_value, parts[0])
        return partial(self.buffers.wait_values, parts)

    def _pending(self, i: Instruction) -> PendingBackward:
        return self.pending.setdefault((i.stage, i.mb), PendingBackward())
