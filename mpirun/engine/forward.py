"""FWD and RECOMPUTE of one stage and microbatch: an act that waits for what it needs, computes, and puts what it made.

Forward.__call__ -> Forward.compute -> LocalStage.forward -> the stage's module
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpirun.data.microbatches import Microbatch
from mpirun.engine.loss import loss_gradient
from mpirun.engine.split_backward import WeightHalf
from mpirun.engine.stage import SavedForward
from mpirun.model.frozen_statistics import buffer_copies, frozen_statistics
from schedgen.ir.instructions import Instruction, Kind, Op

if TYPE_CHECKING:
    from mpirun.engine.forward_backward import ForwardBackward

# Computes the loss of a microbatch from the last stage's outputs, and puts its metrics into the dict.
Score = Callable[[Microbatch, dict[str, Tensor], list[Tensor]], Tensor]


class PendingBackward:
    """What a forward, or the first half of a backward, keeps for later jobs of the same stage and microbatch."""

    __slots__ = ("buffers", "half", "loss_gradient", "saved")
    buffers: dict[str, Tensor]  # if forwards change some: their values before a forward that is recomputed
    saved: SavedForward
    half: WeightHalf | None
    loss_gradient: Tensor  # last stage only: the gradient that its backward starts from


class Forward:
    """The act of a FWD or RECOMPUTE.

    weights   waits until the weights have arrived; None: they are never fetched
    inputs    the producers' outputs, as values of this rank
    bundles   what messages these came in, by producer; None: each is a single tensor
    read      gives the microbatch; None: the stage neither reads input nor has the loss
    score     computes the loss from the stage's outputs; None: it has none here
    run       `compute`, or what surrounds it: a captured graph, copies of the buffers that it changes
    put       takes the outputs to where they are needed
    """

    def __init__(
        self, jobs: ForwardBackward, i: Instruction, saves: bool, put: Callable[[list[Tensor]], object]
    ) -> None:
        """`saves`: a backward follows without a RECOMPUTE before it."""
        header, graph, dataflow = jobs.header, jobs.header.graph, jobs.dataflows[i.mb]
        self.stage, self.mb, self.saves, self.put = jobs.stage_of(i), i.mb, saves, put
        self.weights, self.pending = jobs.wait_for_weights(i), jobs.pending_of(i)
        producers = graph.producers[i.stage]
        self.inputs = [jobs.buffers.get(Kind.X, p, i.mb, graph.output_consumer(p, i.stage)) for p in producers]
        bundles = [dataflow.x(p, i.stage) for p in producers]
        self.bundles = bundles if any(len(bundle.indices) != 1 for bundle in bundles) else None
        self.arguments, self.specs = dataflow.arguments(i.stage), dataflow.outputs[i.stage]
        has_loss = not graph.consumers[i.stage] and not jobs.has_minibatch_loss(i)
        reads = self.arguments.reads_input or has_loss
        self.read = jobs.microbatches.reader(i.mb, saves) if reads else None
        self.score = jobs.score(i) if has_loss else None
        self.records = has_loss and i.op == Op.FWD and header.is_first_slice(i.stage)
        facts = self.stage.shape.loss if has_loss else None
        self.rng, self.draws_in_loss = self.stage.layer_rng, facts is not None and facts.draws
        self.wait_value, self.position, self.device = jobs.buffers.wait_value, jobs.position, jobs.device
        self.seed, self.microbatches, self.has_flush = jobs.setup.seed, header.microbatches, header.has_flush
        self.losses, self.metrics = jobs.losses, jobs.metrics
        self.run: Callable[..., tuple[list[Tensor], dict[str, Tensor]]]
        if self.stage.shape.overwrites_buffers and (i.stage, i.mb) in jobs.redone:
            self.pending.buffers = {}
            again = i.op == Op.RECOMPUTE
            around = jobs.job(i, self._frozen if again else self._noting_buffers)
            self.run = partial(self._again if again else self._first, around)
        else:
            self.run = jobs.job(i, self.compute)

    def __call__(self) -> None:
        """Compute the stage on the microbatch."""
        if self.weights is not None:
            self.weights()
        values = [x.value if x.arriving is None else self.wait_value(x) for x in self.inputs]
        if self.bundles is not None:
            values = [x for message, of in zip(values, self.bundles, strict=True) for x in of.unpack(message)]
        batch = None if self.read is None else self.read()
        if self.rng.layers or self.draws_in_loss:
            number = self.position.accumulation_pass * self.microbatches + self.mb
            self.rng.at = (self.seed, self.position.step, number)
        leaves = batch.leaves if batch is not None and self.arguments.reads_input else ()
        if batch is None or self.score is None:
            outputs, _ = self.run(values, leaves, None)
        else:
            # A captured job has no use for the divisor, which may be another in every step.
            outputs, metrics = self.run(values, leaves, batch._replace(leaves=[], loss_divisor=1))
            self._keep_loss(batch, outputs[0], metrics)
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

    def _keep_loss(self, batch: Microbatch, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        if self.records:
            self.losses[self.mb] = loss
            if batch.padding < batch.size or not batch.size:  # else it is all padding
                self.metrics[self.mb] = metrics
        if self.saves:
            divisor = batch.loss_divisor if self.has_flush else 1  # without a flush STEP divides
            self.pending.loss_gradient = loss_gradient(loss.dtype, divisor, self.device)

    # A forward that changes buffers and is recomputed: the RECOMPUTE changes none. It reads their values from before
    # the FWD, or their current ones if another rank did the FWD.

    def _noting_buffers(self, *inputs: Any) -> tuple[Any, dict[str, Tensor]]:
        kept = buffer_copies(self.stage.module, every_name=True)
        return self.compute(*inputs), kept

    def _first(self, job: Callable[..., Any], *inputs: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        made, self.pending.buffers = job(*inputs)
        return made

    def _frozen(self, before: dict[str, Tensor], *inputs: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        with frozen_statistics(self.stage.module, before):
            return self.compute(*inputs)

    def _again(self, job: Callable[..., Any], *inputs: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        made = job(self.pending.buffers, *inputs)
        self.pending.buffers = {}
        return made
