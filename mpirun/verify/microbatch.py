"""One microbatch in one process: forward through all stages, and backward.

The autograd graph is cut between stages, so that gradients which several stages return for one value are added in the
order of these stages. For an uncut graph autograd would add in another order: the same sum with other bits. The outputs
of a stage's tensor slices are added in the order of the slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch
from mpirun.data.values import to_device
from mpirun.engine.loss import MinibatchLoss
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from mpirun.model.autocast import autocast
from mpirun.model.dataflow import Value
from mpirun.model.loss import loss_and_metrics, loss_input
from mpirun.model.module_tensors import frozen_statistics
from mpirun.model.rng import LOSS, derived_seed
from mpirun.verify.reference_stage import ReferenceStage, gradient_of
from schedgen.ir.header import Header
from schedgen.ir.instructions import F


class ForwardPass(NamedTuple):
    """A microbatch that has been through all stages."""

    batch: Microbatch
    outputs: dict[Value, Tensor]
    leaves: list[dict[Value, Tensor]]  # by stage: what it read, detached from the graph of its producer

    def outputs_of(self, stage: int) -> list[Tensor]:
        """A stage's outputs."""
        return [x for value, x in self.outputs.items() if value.stage == stage]


def forward(setup: Setup, header: Header, stages: Sequence[ReferenceStage], step: int, number: int) -> ForwardPass:
    """Compute all stages on microbatch `number` of a step.

    It changes the buffers of a stage if the rank whose buffers are the model's computes the stage on this microbatch.
    """
    batch = to_device(setup.microbatches(step, number), setup.device.torch)
    outputs: dict[Value, Tensor] = {}
    read: dict[Value, Tensor] = {}  # what consumers read: the sum over slices if a stage is sliced
    leaves: list[dict[Value, Tensor]] = []
    dataflow = setup.dataflow
    for stage, (reference, sources) in enumerate(zip(stages, dataflow.reads, strict=True)):
        reference.layer_rng.at = (setup.seed, step, number)
        values = dict.fromkeys(source for source in sources if isinstance(source, Value))
        leaves.append({value: read[value].detach().requires_grad_(read[value].is_floating_point()) for value in values})
        arguments = [
            dataflow.outputs[source.stage][source.output].read(leaves[-1][source])
            if isinstance(source, Value)
            else batch.leaves[source.leaf]
            for source in sources
        ]
        computed_by = header.compute[F, stage, number]
        frozen = setup.shapes[stage].overwrites_buffers and computed_by != statistics_rank(header, stage)
        kept = frozen_statistics(reference.module) if frozen else contextlib.nullcontext()
        with autocast(setup.device.kind, setup.autocast_dtype), kept:
            output = reference(*(x.clone() if isinstance(x, Tensor) else x for x in arguments))
        tensors = [output] if isinstance(output, Tensor) else list(output)
        for index in setup.shapes[stage].aliased_outputs:
            tensors[index] = tensors[index].clone()
        if header.graph.consumers[stage]:  # the loss takes outputs as they are
            tensors = [spec.sent(x) for spec, x in zip(dataflow.outputs[stage], tensors, strict=True)]
        made = {Value(stage, index): x for index, x in enumerate(tensors)}
        outputs |= made
        read |= made
        summed = [Value(slice, 0) for slice in header.summed_stages(stage)]
        if len(summed) > 1 and stage == summed[-1].stage:
            read |= dict.fromkeys(summed, sum_in_order([outputs[value] for value in summed]))
    return ForwardPass(batch, outputs, leaves)


def forward_backward(
    setup: Setup,
    header: Header,
    stages: Sequence[ReferenceStage],
    step: int,
    number: int,
    divisor: float | None = None,
) -> float:
    """Run microbatch `number` of a step forward and backward; return its loss. Gradients are added to the parameters'.

    The gradients are those of the loss divided by `divisor`; None: by the microbatch's own `loss_divisor`.
    """
    done = forward(setup, header, stages, step, number)
    end = header.first_slices[-1]  # slices of the last stage have the same loss
    losses = []
    with autocast(setup.device.kind, setup.autocast_dtype):
        for s in range(end, len(stages)):
            setup.device.seed(derived_seed(setup.seed, step, number, LOSS))
            losses.append(loss_and_metrics(setup.model.loss, loss_input(done.outputs_of(s)), done.batch)[0])
    divisor = done.batch.loss_divisor if divisor is None else divisor
    roots = {Value(stage, 0): loss / divisor for stage, loss in enumerate(losses, start=end)}
    inner = {value: x for value, x in done.outputs.items() if value.stage < end}
    gradients = {value: torch.ones_like(root) for value, root in roots.items()}
    _backward(header, done._replace(outputs=inner | roots), gradients)
    return losses[0].item()


def backward_of_minibatch(setup: Setup, header: Header, forwards: Sequence[ForwardPass], step: int) -> list[float]:
    """The backwards of all microbatches, from their common loss; returns that loss once for each microbatch."""
    minibatch, last = MinibatchLoss(setup.model, setup.device.torch, setup.autocast_dtype), header.stages - 1
    setup.device.seed(derived_seed(setup.seed, step, LOSS))
    losses: list[float] = []
    for number, done in enumerate(forwards):
        minibatch.add_outputs(number, done.outputs_of(last), done.batch)
    for number, done in enumerate(forwards):
        gradients, loss, _ = minibatch.take(number)
        _backward(header, done, {Value(last, index): x for index, x in enumerate(gradients)})
        losses.append(loss.item())
    return losses


def _backward(header: Header, done: ForwardPass, gradients: Mapping[Value, Tensor | None]) -> None:
    """Run the backward of all stages; `gradients`: of the outputs of the last stage, or of its slices."""
    summands: dict[Value, list[Tensor]] = {value: [] for value in done.outputs}  # last consumer first
    for value, gradient in gradients.items():
        if gradient is not None:
            summands[value].append(gradient)
    for first in reversed(header.first_slices):
        slices = header.slices_of(first)
        for stage in slices:
            _backward_of_stage(stage, done.outputs, summands)
        of_slices = [
            {value: gradient_of(leaf) for value, leaf in done.leaves[stage].items() if leaf.is_floating_point()}
            for stage in slices
        ]
        if len(header.summed_stages(first)) > 1:
            sums = [sum_in_order(parts) for parts in zip(*(of_slice.values() for of_slice in of_slices), strict=True)]
            of_slices = [dict(zip(of_slice, sums, strict=True)) for of_slice in of_slices]
        for of_slice in of_slices:
            for value, gradient in of_slice.items():
                summands[value].append(gradient)


def _backward_of_stage(stage: int, outputs: Mapping[Value, Tensor], summands: Mapping[Value, list[Tensor]]) -> None:
    """Run the backward of one stage; `summands`: by output, the gradients from its consumers, taken off the lists."""
    roots: list[Tensor] = []
    gradients: list[Tensor] = []
    for value in [v for v in outputs if v.stage == stage and outputs[v].requires_grad and summands[v]]:
        gradient = summands[value].pop()
        while summands[value]:
            gradient = gradient + summands[value].pop()
        roots.append(outputs[value])
        gradients.append(gradient.contiguous())
    if roots:
        torch.autograd.backward(roots, gradients)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the parts, added in their order."""
    total = parts[0].detach().clone()
    for part in parts[1:]:
        total += part.detach()
    return total
