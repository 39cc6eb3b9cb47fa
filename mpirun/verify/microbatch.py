"""One microbatch in one process: forward through all stages of the reference, and backward.

The autograd graph is cut between stages, so that gradients which several stages return for one value are added in the
order of these stages. For an uncut graph autograd would add in another order: the same sum with other bits. The outputs
of a stage's tensor slices are added in the order of the slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch
from mpirun.data.values import to_device
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.loss import MinibatchLoss
from mpirun.engine.recipe import NamedParameter, SteppedOptimizer
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from mpirun.model.dataflow import Value
from mpirun.model.loss import autocast, loss_and_metrics, loss_input
from mpirun.model.module_tensors import buffer_copies, frozen_statistics, given_modules, own_tensors
from mpirun.model.rng import LOSS, derived_seed, layers_of
from mpirun.model.stage_copies import stage_apart, stage_with
from mpirun.verify.record import Parameters, on_host
from schedgen.ir.header import Header
from schedgen.ir.instructions import F

Start = Mapping[int, Mapping[str, Tensor]]  # by stage of the model, the values that a run's first step begins with


def first_values(model: Model, seed: int) -> Start:
    """Copies of the values of the modules that a script gave, by stage and name: a run changes these modules."""
    start: dict[int, Mapping[str, Tensor]] = {}
    for stage, entry in enumerate(model.stages):
        if given_modules(entry):
            with stage_apart(model, stage, seed) as module:
                start[stage] = own_tensors(module)
    return start


def gradient_of(leaf: Tensor) -> Tensor:
    """A leaf's gradient; zeros if there is none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class ReferenceStage:
    """A stage's module with all its weights, and its trained parameters by name."""

    def __init__(self, setup: Setup, index: int, earlier: Iterable[ReferenceStage], start: Start) -> None:
        """`setup`: the run's, or that of the model without slices; `earlier`: stages that were built before."""
        self.index, shape, model = index, setup.shapes[index], setup.model
        self.call = model.origin.call
        if (values := start.get(model.model_stage(index))) is None:
            self.module = build_stage(model, index, setup.seed)
        else:
            self.module = stage_with(model, index, values)
        before = [stage.local for stage in earlier]
        self.local: LocalStage = LocalStage(self.module, index, shape, setup.device, owned_shards=(-1,), earlier=before)
        # All layers: trials of other shapes may have found more that draw than that of the first.
        entry, self.layer_rng = model.stages[index], self.local.layer_rng
        layers = layers_of(self.module, list(entry) if isinstance(entry, Mapping) else [])
        self.layer_rng.add(self.module, shape.model_stage, layers)
        self.parameters = dict(zip(self.local.names, self.local.parameters, strict=True))

    def __call__(self, *arguments: Any) -> Any:
        """The forward."""
        self.local.bind()
        return self.module(*arguments) if self.call is None else self.call(self.module, *arguments)

    def take_gradients(self) -> dict[str, Tensor]:
        """Remove and return the parameters' gradients; zeros where there is none."""
        gradients = {name: gradient_of(parameter) for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients


def changed_buffers(stages: Iterable[ReferenceStage]) -> Parameters:
    """Copies, in host memory, of the buffers of stages whose forwards change some."""
    changing = [stage for stage in stages if stage.local.shape.overwrites_buffers]
    return on_host({(s.index, name): x for s in changing for name, x in buffer_copies(s.module).items()})


def optimizer_of(setup: Setup, stages: Sequence[ReferenceStage]) -> SteppedOptimizer | None:
    """One optimizer for all trained parameters of these stages; None: there are none."""
    named = [
        NamedParameter(setup.model.entry_name(stage.index, name), parameter, parameter.shape, True)
        for stage in stages
        for name, parameter in stage.parameters.items()
    ]
    return setup.recipe.make(named, setup.seed) if named else None


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
        reference.layer_rng.at = ()
        tensors = [output] if isinstance(output, Tensor) else list(output)
        for index in setup.shapes[stage].aliased_outputs:
            tensors[index] = tensors[index].clone()
        if header.graph.consumers[stage]:  # the loss takes outputs as they are
            tensors = [spec.sent(x) for spec, x in zip(dataflow.outputs[stage], tensors, strict=True)]
        made = {Value(stage, index): x for index, x in enumerate(tensors)}
        outputs |= made
        read |= made
        summed = [Value(slice, 0) for slice in header.tensor_parallel.summed_stages(stage)]
        if len(summed) > 1 and stage == summed[-1].stage:
            read |= dict.fromkeys(summed, sum_in_order([outputs[value] for value in summed]))
    return ForwardPass(batch, outputs, leaves)


def forward_backward(
    setup: Setup, header: Header, stages: Sequence[ReferenceStage], step: int, number: int, divisor: float | None = None
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
        slices = header.tensor_parallel.slices_of(first)
        for stage in slices:
            _backward_of_stage(stage, done.outputs, summands)
        of_slices = [
            {value: gradient_of(leaf) for value, leaf in done.leaves[stage].items() if leaf.is_floating_point()}
            for stage in slices
        ]
        if len(header.tensor_parallel.summed_stages(first)) > 1:
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
