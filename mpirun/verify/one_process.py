"""The same steps in one process and without any schedule, to compare with what the ranks did.

The reference is the loop everyone knows: forward through all stages, loss / B,
backward, microbatch after microbatch; then clip and step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpirun.data.microbatches import Microbatch, to_device
from mpirun.engine.grad_norm import norms, whole_norm
from mpirun.engine.loss import WholeLoss
from mpirun.engine.optimizer import clip_factor
from mpirun.engine.setup import Training
from mpirun.model.autocast import autocast
from mpirun.model.build_stage import build_stage
from mpirun.model.dataflow import Dataflow, Value
from mpirun.model.rng import LayerRng
from mpirun.model.shapes import loss_input
from mpirun.verify.record import Parameters, Record
from schedgen.ir.header import Header
from schedgen.ir.stage_graph import StageGraph
from schedgen.ir.tensor_parallel import TensorParallel


def reference(of: Training, header: Header, begun: int, steps: int, beat: Callable[[], None]) -> Record:
    """The same steps in one process, from the first; recorded from step `begun` on. `beat`: called now and then."""
    modules = [build_stage(of.model, stage, of.seed).to(of.device.torch) for stage in range(header.stages)]
    layer_rngs = [
        LayerRng(module, shape.model_stage, shape.random_layers, of.device.seed)
        for module, shape in zip(modules, of.shapes, strict=True)
    ]
    parameters: dict[tuple[int, str], torch.nn.Parameter] = {
        (stage, name): parameter
        for stage, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    start = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    optimizer = of.recipe.make(list(parameters.values())) if parameters else None
    losses: list[list[float]] = []
    passed: list[Passed] = []
    gradients: list[Parameters] = []
    for step in range(steps):
        losses.append([])
        total: Parameters = {}
        for walk in range(of.walks):
            summed: Parameters = {}
            for mb in range(header.microbatches):
                number = walk * header.microbatches + mb
                for layer_rng in layer_rngs:
                    layer_rng.at = (of.seed, step, number)
                if of.model.loss_of == "minibatch":
                    passed.append(forward(of, header, modules, step, number))
                else:
                    losses[-1].append(forward_backward(of, header, modules, step, number))
                beat()
            if of.model.loss_of == "minibatch":
                losses[-1] += whole_loss(of, header, passed)
                passed.clear()
            for key, parameter in parameters.items():
                summed[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
            for tie in of.model.tied:  # copies, whose gradients are added in the order of the stages
                copies = sorted({(stage, name) for stage, name in tie if (stage, name) in summed})
                whole = summed[copies[0]]
                for key in copies[1:]:
                    whole = whole + summed[key]
                summed |= {key: whole.clone() for key in copies}
            total = {key: grad if walk == 0 else total[key] + grad for key, grad in summed.items()}
        sizes = zip(total, norms(list(total.values()), of.canonical), strict=True)
        once = [0.0 if name in of.model.tied_to_earlier(stage, [name]) else size for (stage, name), size in sizes]
        if not np.isfinite([*losses[-1], *once]).all():
            continue
        if step >= begun:
            gradients.append({key: grad.clone() for key, grad in total.items()})
        if of.recipe.clip is not None:
            factor = clip_factor(whole_norm(once), of.recipe.clip)
            for grad in total.values():
                grad.mul_(factor)
        for key, parameter in parameters.items():
            parameter.grad = total[key]
        if optimizer is not None:
            of.recipe.step(optimizer, step)
            optimizer.zero_grad()
    return Record(losses[begun:], gradients, {key: parameter.detach() for key, parameter in parameters.items()}, start)


class Passed(NamedTuple):
    """A microbatch that has been through all stages."""

    batch: Microbatch
    outputs: dict[Value, Tensor]
    leaves: list[dict[Value, Tensor]]  # by stage: what it read, cut off from where it came from

    def of(self, stage: int) -> list[Tensor]:
        """A stage's outputs."""
        return [x for one, x in self.outputs.items() if one.stage == stage]


def forward_backward(
    of: Training,
    header: Header,
    modules: Sequence[Callable[..., Any]],
    step: int,
    number: int,
    parts: float | None = None,
) -> float:
    """One microbatch through all stages and back; its loss. Of that the gradients are a share, one of `parts`."""
    passed = forward(of, header, modules, step, number)
    end = len(modules) - header.tensor_parallel.degree  # shards of the last stage have the same loss
    with autocast(of.device.kind, of.mixed):
        losses = [of.model.loss(loss_input(passed.of(s)), passed.batch.target) for s in range(end, len(modules))]
    parts = passed.batch.loss_divisor if parts is None else parts
    roots = {Value(stage, 0): loss / parts for stage, loss in enumerate(losses, start=end)}
    inner = {one: x for one, x in passed.outputs.items() if one.stage < end}
    ones = {one: torch.ones_like(root) for one, root in roots.items()}
    backward(header, passed._replace(outputs=inner | roots), ones)
    return losses[0].item()


def whole_loss(of: Training, header: Header, passed: Sequence[Passed]) -> list[float]:
    """The loss of all microbatches together, once for each, and all of them back."""
    one, last = WholeLoss(of.model, len(passed), of.device.kind, of.mixed), header.stages - 1
    for number, each in enumerate(passed):
        one.take(number, each.of(last), each.batch.target)
    for number, each in enumerate(passed):
        backward(header, each, {Value(last, index): x for index, x in enumerate(one.gradients(number))})
    return [loss.item() for loss in one.losses.values()]


def forward(of: Training, header: Header, modules: Sequence[Callable[..., Any]], step: int, number: int) -> Passed:
    """One microbatch through all stages.

    The graph is cut at the borders of stages, so that gradients which several
    stages return for one value are added in the order of these stages.
    Autograd's own order for a graph in one piece is another, and gives other
    bits though the same sum. What shards of a stage give is added in their
    order.
    """
    T = header.tensor_parallel.degree
    batch = to_device(of.batches(step, number), of.device.torch)
    outputs: dict[Value, Tensor] = {}
    read: dict[Value, Tensor] = {}  # by consumers
    leaves: list[dict[Value, Tensor]] = []
    for stage, (module, sources) in enumerate(zip(modules, of.dataflows[0].reads, strict=True)):
        values = dict.fromkeys(one for one in sources if isinstance(one, Value))
        leaves.append({one: read[one].detach().requires_grad_(read[one].is_floating_point()) for one in values})
        given = [leaves[-1][one] if isinstance(one, Value) else batch.leaves[one.leaf] for one in sources]
        with autocast(of.device.kind, of.mixed):
            found = module(*(x.clone() if isinstance(x, Tensor) else x for x in given))
        every = [found] if isinstance(found, Tensor) else list(found)
        for index in of.shapes[stage].aliased_outputs:
            every[index] = every[index].clone()
        inner = header.graph.consumers[stage]  # what is sent is contiguous; the loss takes what it is given
        mine = {Value(stage, index): x.contiguous() if inner else x for index, x in enumerate(every)}
        outputs |= mine
        read |= mine
        if header.tensor_parallel.split[stage] and stage % T == T - 1:
            shards = [Value(shard, 0) for shard in header.tensor_parallel.siblings(stage)]
            read |= dict.fromkeys(shards, _sum([outputs[one] for one in shards]))
    return Passed(batch, outputs, leaves)


def backward(header: Header, passed: Passed, given: Mapping[Value, Tensor | None]) -> None:
    """Back through all stages; `given`: the gradients of the last ones' outputs."""
    _, outputs, leaves = passed
    T = header.tensor_parallel.degree
    shares: dict[Value, list[Tensor]] = {one: [] for one in outputs}  # of each gradient, last consumer first
    for one, gradient in given.items():
        if gradient is not None:
            shares[one].append(gradient)
    for first in range(len(leaves) - T, -1, -T):
        shards = range(first, first + T)
        for stage in shards:
            _through(stage, outputs, shares)
        found = [{one: _gradient(leaf) for one, leaf in leaves[s].items() if leaf.is_floating_point()} for s in shards]
        if header.tensor_parallel.split[first]:
            totals = [_sum(parts) for parts in zip(*(of_shard.values() for of_shard in found), strict=True)]
            found = [dict(zip(of_shard, totals, strict=True)) for of_shard in found]
        for of_shard in found:
            for one, gradient in of_shard.items():
                shares[one].append(gradient)


def _through(stage: int, outputs: Mapping[Value, Tensor], shares: Mapping[Value, list[Tensor]]) -> None:
    """Back through one stage, from its consumers' shares of the gradients."""
    roots: list[Tensor] = []
    gradients: list[Tensor] = []
    for one in [one for one in outputs if one.stage == stage and outputs[one].requires_grad and shares[one]]:
        gradient = shares[one].pop()
        while shares[one]:
            gradient = gradient + shares[one].pop()
        roots.append(outputs[one])
        gradients.append(gradient.contiguous())
    if roots:
        torch.autograd.backward(roots, gradients)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In their order."""
    total = parts[0].detach().clone()
    for part in parts[1:]:
        total += part.detach()
    return total


def without_shards(of: Training, header: Header) -> tuple[Training, Header]:
    """What is trained, and the stages, of the model that a schedule has shards of."""
    T = header.tensor_parallel.degree
    plain = replace(
        header,
        scheme={**header.scheme, "stages": header.stages // T},
        graph=StageGraph(header.stages // T, tuple(sorted({(p // T, c // T) for p, c in header.graph.edges}))),
        tensor_parallel=TensorParallel(1, (), header.stages // T),
    )
    shapes = of.shapes[::T]
    reads = of.plain.resolved_reads(plain.graph.producers, len(of.batches(0, 0).leaves))
    dataflows = [Dataflow(reads, plain, [shape.outputs for shape in shapes])] * len(of.dataflows)
    return of._replace(model=of.plain, shapes=shapes, dataflows=dataflows), plain
