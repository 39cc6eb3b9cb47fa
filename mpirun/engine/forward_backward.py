"""FWD, BWD and their parts: each prepared once, as a function without arguments that knows its operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch, to_device
from mpirun.engine.buffers import Buffers
from mpirun.engine.grad_buffer import Gradient
from mpirun.engine.loss import WholeLoss
from mpirun.engine.memory_slots import Memory
from mpirun.engine.setup import Training
from mpirun.engine.split_backward import WeightHalf
from mpirun.engine.stage import Finish, Saved, Stage
from mpirun.engine.weight_versions import Versions
from mpirun.model.dataflow import Bundle, TensorSpec
from mpirun.model.shapes import loss_input
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Kind, Op

Act = Callable[[], None]


class Job:
    """What a forward, or the first half of a backward, leaves for later."""

    __slots__ = ("half", "saved")
    saved: Saved
    half: WeightHalf | None


class Compute:
    def __init__(
        self,
        header: Header,
        instructions: Sequence[Instruction],
        stages: dict[int, Stage],
        versions: Versions,
        buffers: Buffers,
        gradient: Callable[[int], Gradient],
        memory: Memory,
        training: Training,
    ) -> None:
        self.header, self.stages, self.buffers, self.gradient, self.memory = header, stages, buffers, gradient, memory
        self.of, self.dataflows, self.versions = training, training.dataflows, versions  # dataflows by microbatch
        self.now, self.walk = 0, 0  # the step being executed, and how often it has been through the list
        self.jobs: dict[tuple[int, int], Job] = {}
        self.batches: dict[int, Microbatch] = {}
        self.readers: dict[int, object] = {}  # of each microbatch: the last to read it
        self.one: Tensor | None = None
        self.whole_loss = WholeLoss(training.model, header.microbatches, training.device.kind, training.mixed)
        self.losses: dict[int, Tensor] = {}  # by microbatch
        self.saves = {(i.stage, i.mb) for i in instructions if i.op in (Op.BWD, Op.BWD_I)}
        self.saves -= {(i.stage, i.mb) for i in instructions if i.op == Op.RECOMPUTE}

    def fwd(self, i: Instruction) -> Act:
        forward = self._forward(i, (i.stage, i.mb) in self.saves)
        if self._ends_in_whole_loss(i):
            return self._whole_loss(i, forward)
        vias = self.header.graph.output_consumers(i.stage)
        given = [self.buffers(Kind.X, i.stage, i.mb, via) for via in vias]
        if not self.header.graph.consumers[i.stage]:  # the loss
            bundles = [Bundle([0], [TensorSpec((), torch.float32)])]
        else:
            bundles = [self.dataflows[i.mb].bundle(Kind.X, i.stage, via) for via in vias]
        if len(bundles) == 1 and bundles[0].indices == (0,):
            (one,) = given

            def act() -> None:
                one.value = forward()[0]

            return act

        device = self.of.device.torch

        def act_parts() -> None:
            outputs = forward()
            for buffer, bundle in zip(given, bundles, strict=True):
                buffer.value = bundle.pack([outputs[index] for index in bundle.indices], device)

        return act_parts

    def recompute(self, i: Instruction) -> Act:
        forward = self._forward(i, save=True)

        def act() -> None:
            forward()

        return act

    def _forward(self, i: Instruction, save: bool) -> Callable[[], list[Tensor]]:
        stage, weights, job, mb = self._stage(i), self._weights(i), self._job(i), i.mb
        producers = self.header.graph.producers[i.stage]
        inputs = [self.buffers(Kind.X, p, mb, self.header.graph.output_consumer(p, i.stage)) for p in producers]
        dataflow = self.dataflows[mb]
        bundles = [dataflow.x(p, i.stage) for p in producers]
        plain = all(len(bundle.indices) == 1 for bundle in bundles)
        arguments, like = dataflow.arguments(i.stage), dataflow.outputs[i.stage]
        read = self._reader(mb, save) if arguments.reads_input else None
        inner = self.header.graph.consumers[i.stage] or self._ends_in_whole_loss(i)
        finish = None if inner else self._scaled_loss(i, save)
        ready = self.buffers.ready

        def forward() -> list[Tensor]:
            weights()
            given = [ready(x) for x in inputs]
            if not plain:
                given = [x for message, bundle in zip(given, bundles, strict=True) for x in bundle.unpack(message)]
            leaves = () if read is None else read().leaves
            stage.layer_rng.at = (self.of.seed, self.now, self.walk * self.header.microbatches + mb)
            outputs, saved = stage.forward(given, finish, save, lambda values: arguments(values, leaves), like)
            if saved is not None:
                job.saved = saved
            return outputs

        return forward

    def _ends_in_whole_loss(self, i: Instruction) -> bool:
        return self.of.model.loss_of == "minibatch" and not self.header.graph.consumers[i.stage]

    def _whole_loss(self, i: Instruction, forward: Callable[[], list[Tensor]]) -> Act:
        """The last stage's forward, whose outputs wait for those of all microbatches."""
        x, loss, read, mb = self.buffers(Kind.X, i.stage, i.mb), self.whole_loss, self._reader(i.mb, save=False), i.mb

        def act() -> None:
            x.value = forward()
            loss.take(mb, x.value, read().target)
            self.losses |= loss.losses
            loss.losses = {}

        return act

    def _scaled_loss(self, i: Instruction, save: bool) -> Finish:
        """The microbatch's share of the loss: its gradients then add up to the mean's, but to updates of their own."""
        read, mb, versions = self._reader(i.mb, save), i.mb, self.header.weight_versions.count

        first = self.header.tensor_parallel.siblings(i.stage)[0]

        def finish(outputs: list[Tensor]) -> Tensor:
            batch = read()
            loss = self.of.model.loss(loss_input(outputs), batch.target).reshape(())
            if save and not loss.requires_grad:
                raise ValueError("the loss has no gradient: it depends on no parameter")
            if i.op == Op.FWD and i.stage == first:  # other shards have the same
                self.losses[mb] = loss.detach()
            return loss / (1 if versions else batch.loss_divisor)

        return finish

    def _reader(self, mb: int, save: bool) -> Callable[[], Microbatch]:
        """What reads a microbatch: made for the first reader, forgotten after the last.

        A forward that saves nothing for its backward does not save them either.
        """
        me = self.readers[mb] = object()

        def read() -> Microbatch:
            if mb not in self.batches:
                number = self.walk * self.header.microbatches + mb
                device = self.of.device.torch
                self.batches[mb] = to_device(self.of.batches(self.now, number), device)
            last = not save or self.readers[mb] is me
            return self.batches.pop(mb) if last else self.batches[mb]

        return read

    def _stage(self, i: Instruction) -> Stage:
        """With the version of its weights that the instruction names."""
        return self.versions.at(i.stage, i.peer) if i.peer >= 0 else self.stages[i.stage]

    def _weights(self, i: Instruction) -> Callable[[], object]:
        """What waits for the stage's weights, all parts of them."""
        parts = [self.buffers(Kind.W, i.stage, via=via) for via in self.header.weight_shards.parts(i.stage)]
        return partial(self.buffers.ready, parts[0]) if len(parts) == 1 else partial(self.buffers.all_ready, parts)

    def _job(self, i: Instruction) -> Job:
        return self.jobs.setdefault((i.stage, i.mb), Job())

    def bwd(self, i: Instruction) -> Act:
        stage, job, weights = self._stage(i), self._job(i), self._weights(i)
        incoming, outgoing = self._incoming(i), self._outgoing(i)
        gradient, key = self.gradient(i.stage), self.memory.row(i.mb)

        def act() -> None:
            given, saved = incoming(), job.saved
            weights()
            gradient.use(key, stage)
            stage.backward(saved, given)
            del job.saved
            outgoing(saved)

        return act

    def bwd_i(self, i: Instruction) -> Act:
        stage, job, weights = self._stage(i), self._job(i), self._weights(i)
        incoming, outgoing = self._incoming(i), self._outgoing(i)

        def act() -> None:
            given, saved = incoming(), job.saved
            weights()
            job.half = stage.backward_input(saved, given)
            del job.saved
            outgoing(saved)

        return act

    def bwd_w(self, i: Instruction) -> Act:
        stage, job, weights = self._stage(i), self._job(i), self._weights(i)
        gradient, key = self.gradient(i.stage), self.memory.row(i.mb)

        def act() -> None:
            weights()
            gradient.add(key, stage.backward_weight(job.half))
            del job.half

        return act

    def _incoming(self, i: Instruction) -> Callable[[], list[Tensor | None]]:
        """The gradients of the stage's outputs: its consumers' shares added in their order."""
        consumers = self.header.graph.consumers[i.stage]
        if self._ends_in_whole_loss(i):
            return lambda: self.whole_loss.gradients(i.mb)
        if not consumers:  # of the loss with respect to itself
            one = self.one = torch.ones((), device=self.of.device.torch) if self.one is None else self.one
            return lambda: [one]
        shares = [
            self.buffers(Kind.G, i.stage, i.mb, self.header.graph.gradient_consumer(i.stage, c)) for c in consumers
        ]
        bundles = [self.dataflows[i.mb].g(i.stage, c) for c in consumers]
        ready, count = self.buffers.ready, len(self.of.shapes[i.stage].outputs)
        if len(shares) == count == len(bundles[0].indices) == 1:
            return lambda: [ready(shares[0])]

        def added() -> list[Tensor | None]:
            found: list[Tensor | None] = [None] * count
            for share, bundle in zip(shares, bundles, strict=True):
                for index, part in zip(bundle.indices, bundle.unpack(ready(share)), strict=True):
                    before = found[index]
                    found[index] = part if before is None else before + part
            return found

        return added

    def _outgoing(self, i: Instruction) -> Callable[[Saved], None]:
        """What hands on the gradients of a job's inputs."""
        producers = self.header.graph.producers[i.stage]
        shares = [self.buffers(Kind.G, p, i.mb, self.header.graph.gradient_consumer(p, i.stage)) for p in producers]
        dataflow = self.dataflows[i.mb]
        bundles = [dataflow.g(p, i.stage) for p in producers]
        # Of the values that the stage was given, those that are numbers.
        numbers = [
            dataflow.outputs[p][index].dtype.is_floating_point
            for p in producers
            for index in dataflow.x(p, i.stage).indices
        ]

        device = self.of.device.torch

        def hand_on(saved: Saved) -> None:
            values = iter(saved.gradients(numbers) if shares else ())
            for share, bundle in zip(shares, bundles, strict=True):
                share.value = bundle.pack(list(itertools.islice(values, len(bundle.indices))), device)

        return hand_on
