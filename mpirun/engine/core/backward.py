"""BWD, BWD_I and BWD_W of one stage and microbatch: acts that wait for gradients, compute, and put what they made.

The gradients of a stage's outputs are its consumers' g; those of its inputs go into the g of its producers; those of
its weights are added to dw.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mpirun.engine.core.buffers import in_turn, putter
from mpirun.engine.core.context import Context
from schedgen.ir.instructions import Instruction, Kind, Op


class Backward:
    """The act of a BWD, or of a BWD_I, which leaves the gradients of the weights to a BWD_W."""

    def __init__(self, context: Context, i: Instruction) -> None:
        graph, dataflow = context.header.graph, context.dataflow
        self.stage, self.pending, self.weights = context.stage_of(i), context.pending_of(i), context.wait_for_weights(i)
        self.gradient, self.key = context.grad_buffers.of_stage(i.stage), context.slots.row_key(i.mb)
        self.output_gradients = _output_gradients(context, i)
        producers = graph.producers[i.stage]
        self.floats = [  # by input, whether it has a gradient
            dataflow.outputs[p][index].dtype.is_floating_point
            for p in producers
            for index in dataflow.x(p, i.stage).indices
        ]
        buffers = [context.buffers.get(Kind.G, p, i.mb, graph.gradient_consumer(p, i.stage)) for p in producers]
        bundles = [dataflow.g(p, i.stage) for p in producers]
        self.put = putter(buffers, bundles, in_turn(bundles), context.device.torch)
        self.run = context.around(i, self.stage, self.compute if i.op == Op.BWD else self.compute_first_half)

    def __call__(self) -> None:
        """Run the stage's backward on the microbatch."""
        gradients = self.output_gradients()
        if self.weights is not None:
            self.weights()
        self.put(self.run(gradients))

    def compute(self, gradients: list[Tensor | None]) -> list[Tensor]:
        """The gradients of the inputs, from those of the outputs; those of the weights are added to dw."""
        saved = self.pending.saved
        self.gradient.attach(self.key, self.stage)
        self.stage.backward(saved, gradients)
        del self.pending.saved
        return saved.take_gradients(self.floats)

    def compute_first_half(self, gradients: list[Tensor | None]) -> list[Tensor]:
        """The gradients of the inputs only; `pending.half` keeps what BWD_W needs."""
        saved = self.pending.saved
        self.pending.half = self.stage.backward_input(saved, gradients)
        del self.pending.saved
        return saved.take_gradients(self.floats)


class WeightBackward:
    """The act of a BWD_W: the gradients of the weights are added to dw."""

    def __init__(self, context: Context, i: Instruction) -> None:
        self.stage, self.pending, self.weights = context.stage_of(i), context.pending_of(i), context.wait_for_weights(i)
        self.gradient, self.key = context.grad_buffers.of_stage(i.stage), context.slots.row_key(i.mb)
        self.run = context.around(i, self.stage, self.compute)

    def __call__(self) -> None:
        """Run the second half of the stage's backward on the microbatch."""
        if self.weights is not None:
            self.weights()
        self.run()

    def compute(self) -> None:
        """As `__call__`, when the weights are there."""
        self.gradient.attach(self.key, self.stage)
        self.stage.backward_weight(self.pending.half)
        del self.pending.half


def _output_gradients(context: Context, i: Instruction) -> Callable[[], list[Tensor | None]]:
    """A function that returns the gradients of a stage's outputs: its consumers' g, added in the consumers' order."""
    if context.is_last(i.stage):
        loss, pending = context.minibatch_loss, context.pending_of(i)
        if loss is None:
            return lambda: [pending.loss_gradient]

        def of_minibatch() -> list[Tensor | None]:
            gradients, context.losses[i.mb], context.metrics[i.mb] = loss.take(i.mb)
            return gradients

        return of_minibatch
    graph, buffers, count = context.header.graph, context.buffers, len(context.shapes[i.stage].outputs)
    consumers = graph.consumers[i.stage]
    messages = [buffers.get(Kind.G, i.stage, i.mb, graph.gradient_consumer(i.stage, c)) for c in consumers]
    bundles = [context.dataflow.g(i.stage, c) for c in consumers]
    indices = [index for bundle in bundles for index in bundle.indices]
    received = buffers.getter(messages, bundles)
    if indices == [*range(count)]:
        return received  # type: ignore[return-value]

    def added() -> list[Tensor | None]:
        sums: list[Tensor | None] = [None] * count
        for index, gradient in zip(indices, received(), strict=True):
            before = sums[index]
            sums[index] = gradient if before is None else before + gradient
        return sums

    return added
