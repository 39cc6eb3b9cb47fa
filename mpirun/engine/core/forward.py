"""FWD and RECOMPUTE of one stage and microbatch: an act that waits for what it needs, computes, and puts what it made.

Forward.__call__ -> Forward.compute -> LocalStage.forward -> the stage's module
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch
from mpirun.engine.core.buffers import putter
from mpirun.engine.core.context import Context
from mpirun.engine.core.offload import SavedTensors
from mpirun.model.dataflow import Bundle, TensorSpec
from schedgen.ir.instructions import Instruction, Kind, Op

if TYPE_CHECKING:
    from mpirun.engine.loss import MinibatchLoss


@lru_cache(256)  # a step's microbatches may have any weights
def loss_gradient(dtype: torch.dtype, divisor: float, device: torch.device) -> Tensor:
    """The gradient of a loss divided by `divisor`, with respect to the loss; a cached tensor."""
    return torch.ones((), dtype=dtype, device=device).div_(divisor)


class Forward:
    """The act of a FWD or RECOMPUTE.

    weights   waits until the weights have arrived; None: they are never fetched
    inputs    waits for the producers' outputs, and returns them
    read      gives the microbatch; None: the stage neither reads input nor has the loss
    score     computes the loss from the stage's outputs; None: it has none here
    run       `compute`, or what surrounds it: a captured graph, copies of the buffers that it changes
    put       takes the outputs to where they are needed
    """

    def __init__(self, context: Context, i: Instruction) -> None:
        header, graph, dataflow = context.header, context.header.graph, context.dataflow
        again, last = i.op == Op.RECOMPUTE, context.is_last(i.stage)
        self.context, self.stage, self.mb = context, context.stage_of(i), i.mb
        self.saves = again or (i.stage, i.mb) in context.saving
        self.weights, self.pending = context.wait_for_weights(i), context.pending_of(i)
        producers = graph.producers[i.stage]
        self.inputs = context.buffers.getter(
            [context.buffers.get(Kind.X, p, i.mb, graph.output_consumer(p, i.stage)) for p in producers],
            [dataflow.x(p, i.stage) for p in producers],
        )
        self.arguments, self.specs = dataflow.arguments(i.stage), dataflow.outputs[i.stage]
        self.score = context.score(self.stage, i) if last and context.minibatch_loss is None else None
        reads = self.arguments.reads_input or self.score is not None
        offloads = (i.stage, i.mb) in context.offloaded  # the microbatch, too, should leave: others make it anew
        self.read = context.microbatches.reader(i.mb, self.saves and not offloads) if reads else None
        self.records = not again and header.is_first_slice(i.stage)
        self.rng, self.position = self.stage.layer_rng, context.position
        self.draws = bool(self.rng.layers) or self.score is not None
        self.device, self.has_flush = context.device.torch, header.has_flush
        if self.score is not None:  # cached before a step: its memory does not count as kept by a forward
            loss_gradient(torch.float32, context.microbatches.source.count if self.has_flush else 1, self.device)
        self.run: Callable[..., tuple[list[Tensor], dict[str, Tensor]]] = context.around(
            i, self.stage, self.compute_offloadable if offloads else self.compute
        )
        self.put: Callable[[list[Tensor]], object]
        if again:  # only what its backward needs
            self.put = lambda outputs: None
        elif last and context.minibatch_loss is not None:
            self.put = self._collector(i, context.minibatch_loss)
        else:
            self.put = self._putter(i)

    def __call__(self) -> None:
        """Compute the stage on the microbatch."""
        if self.weights is not None:
            self.weights()
        values = self.inputs()
        batch = None if self.read is None else self.read()
        if self.draws:
            self.rng.at = (self.context.seed, self.position.step, self.mb)
        leaves = batch.leaves if batch is not None and self.arguments.reads_input else ()
        if batch is None or self.score is None:
            outputs, _ = self.run(values, leaves, None)
        else:
            # A captured job has no use for the divisor, which may be another in every step.
            outputs, metrics = self.run(values, leaves, batch._replace(leaves=[], loss_divisor=1))
            if self.records:
                self.context.losses[self.mb] = outputs[0]
                if batch.padding < batch.size or not batch.size:  # else it is all padding
                    self.context.metrics[self.mb] = metrics
            if self.saves:
                divisor = batch.loss_divisor if self.has_flush else 1  # without a flush STEP divides
                self.pending.loss_gradient = loss_gradient(outputs[0].dtype, divisor, self.device)
        self.rng.at = ()
        self.put(outputs)

    def compute(
        self, values: list[Tensor], leaves: Sequence[Any], batch: Microbatch | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The stage's outputs, or the loss if it is the last stage, and the loss's metrics."""
        metrics: dict[str, Tensor] = {}
        loss = None if self.score is None or batch is None else partial(self.score, batch, metrics)
        outputs, saved = self.stage.forward(values, loss, self.saves, self.arguments, leaves, self.specs)
        if saved is not None:
            self.pending.saved = saved
        return outputs, metrics

    def compute_offloadable(
        self, values: list[Tensor], leaves: Sequence[Any], batch: Microbatch | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """As `compute`; what it saves can leave the device until the backward; to a rank goes none of the data."""
        self.stage.bind()  # the parameters that it holds anyway
        held = (values, leaves, batch) if (self.stage.index, self.mb) in self.context.lent else values
        self.pending.tensors = SavedTensors(self.context.device, self.stage.module, held, (leaves, batch))
        with self.pending.tensors.hooks():
            return self.compute(values, leaves, batch)

    def _putter(self, i: Instruction) -> Callable[[list[Tensor]], object]:
        """A function that puts the outputs, or the loss, into buffers x: one, or one per consumer."""
        consumers = self.context.header.graph.output_consumers(i.stage)
        buffers = [self.context.buffers.get(Kind.X, i.stage, i.mb, consumer) for consumer in consumers]
        if self.context.is_last(i.stage):
            bundles = [Bundle([0], [TensorSpec((), torch.float32)])]
        else:
            bundles = [self.context.dataflow.bundle(Kind.X, i.stage, consumer) for consumer in consumers]
        return putter(buffers, bundles, [[*bundle.indices] for bundle in bundles], self.device)

    def _collector(self, i: Instruction, loss: MinibatchLoss) -> Callable[[list[Tensor]], object]:
        x, read = self.context.buffers.get(Kind.X, i.stage, i.mb), self.context.microbatches.reader(i.mb, keep=False)

        def collect(outputs: list[Tensor]) -> None:
            x.value = outputs
            loss.add_outputs(i.mb, outputs, read())

        return collect
