"""The gradients that a stage's backward takes and returns, in buffers g, as messages of one or several tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from mpirun.engine.core.context import Context
from mpirun.engine.core.stage import SavedForward
from schedgen.ir.instructions import Instruction, Kind


def output_gradients(context: Context, i: Instruction) -> Callable[[], list[Tensor | None]]:
    """A function that returns the gradients of a stage's outputs: its consumers' g, added in the consumers' order."""
    graph, buffers = context.header.graph, context.buffers
    consumers = graph.consumers[i.stage]
    messages = [buffers.get(Kind.G, i.stage, i.mb, graph.gradient_consumer(i.stage, c)) for c in consumers]
    bundles = [context.setup.dataflows[i.mb].g(i.stage, c) for c in consumers]
    wait_value, count = buffers.wait_value, len(context.setup.shapes[i.stage].outputs)
    if len(messages) == count == len(bundles[0].indices) == 1:
        (only,) = messages
        return lambda: [only.value if only.arriving is None else wait_value(only)]

    def added() -> list[Tensor | None]:
        sums: list[Tensor | None] = [None] * count
        for message, bundle in zip(messages, bundles, strict=True):
            for index, gradient in zip(bundle.indices, bundle.unpack(wait_value(message)), strict=True):
                before = sums[index]
                sums[index] = gradient if before is None else before + gradient
        return sums

    return added


def gradient_taker(context: Context, i: Instruction) -> Callable[[SavedForward], list[Tensor]]:
    """A function that takes from a saved forward the input gradients that go to the job's producers."""
    dataflow, producers = context.setup.dataflows[i.mb], context.header.graph.producers[i.stage]
    is_floating_point = [
        dataflow.outputs[p][index].dtype.is_floating_point
        for p in producers
        for index in dataflow.x(p, i.stage).indices
    ]
    return lambda saved: saved.take_gradients(is_floating_point) if producers else []


def gradient_giver(context: Context, i: Instruction) -> Callable[[list[Tensor]], None]:
    """A function that puts such input gradients into the buffers g of the job's producers."""
    graph, dataflow = context.header.graph, context.setup.dataflows[i.mb]
    producers, device = graph.producers[i.stage], context.setup.device.torch
    messages = [context.buffers.get(Kind.G, p, i.mb, graph.gradient_consumer(p, i.stage)) for p in producers]
    bundles = [dataflow.g(p, i.stage) for p in producers]

    def give_each(of_inputs: list[Tensor]) -> None:
        for message, gradient in zip(messages, of_inputs, strict=True):
            message.value = gradient

    if all(len(bundle.indices) == 1 for bundle in bundles):
        return give_each

    def give(of_inputs: list[Tensor]) -> None:
        gradients = iter(of_inputs)
        for message, bundle in zip(messages, bundles, strict=True):
            message.value = bundle.pack(list(itertools.islice(gradients, len(bundle.indices))), device)

    return give
