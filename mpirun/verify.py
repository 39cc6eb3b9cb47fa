"""--verify: the same steps in one process and without any schedule, compared with what the ranks did.

The reference is the loop everyone knows: forward through all stages, loss / B,
backward, microbatch after microbatch; then clip and step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.device import autocast
from mpirun.model import build, microbatch, shared_before
from mpirun.optimizer import clip_factor, norms, whole_norm
from mpirun.randomness import Draws
from mpirun.stage import Stage
from mpirun.training import Training
from schedgen.program import Header

Parameters = dict[tuple[int, str], Tensor]  # by stage and name


class Record(NamedTuple):
    """What a run, or a reference, did: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; not of steps that changed nothing
    parameters: Parameters  # in the end


def named(stage: Stage, flat: Tensor) -> Parameters:
    """The parts of a flat tensor of one stage by name, as copies."""
    return {(stage.index, name): view.clone() for name, view in zip(stage.names, stage.views(flat), strict=True)}


def gather(comm: MPI.Intracomm, header: Header, record: Record) -> Record | str | None:
    """On rank 0: the record of all stages, or a sentence where owners of a stage differ; None elsewhere.

    Each rank gives the parameters it owns; gradients come from the first owner.
    """
    hashes = {key: hashlib.sha256(_bytes(value)).hexdigest() for key, value in record.parameters.items()}
    firsts = {key: value for key, value in record.parameters.items() if header.owners[key[0]][0] == comm.rank}
    everything = comm.gather((hashes, [_numpy(gradients) for gradients in record.gradients], _numpy(firsts)))
    if everything is None:
        return None
    parameters: Parameters = {}
    gradients: list[Parameters] = [{} for _ in record.gradients]
    for _, of_steps, final in everything:
        parameters |= _torch(final)
        for merged, one in zip(gradients, of_steps, strict=True):
            merged |= _torch(one)
    for rank, (digests, _, _) in enumerate(everything):
        for key, digest in digests.items():
            if hashlib.sha256(_bytes(parameters[key])).hexdigest() != digest:
                return f"rank {rank} ends with another {key[1]} of stage {key[0]} than the stage's first owner"
    return Record(record.losses, gradients, parameters)


def reference(of: Training, header: Header, begun: int, steps: int, beat: Callable[[], None]) -> Record:
    """The same steps in one process, from the first; recorded from step `begun` on. `beat`: called now and then."""
    modules = [build(of.model, stage, of.seed).to(of.device.torch) for stage in range(header.stages)]
    draws = [
        Draws(module, stage if shape.stage < 0 else shape.stage, shape.draws, of.device.seed)
        for stage, (module, shape) in enumerate(zip(modules, of.shapes, strict=True))
    ]
    parameters: dict[tuple[int, str], torch.nn.Parameter] = {
        (stage, name): parameter
        for stage, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    optimizer = of.recipe.make(list(parameters.values())) if parameters else None
    losses: list[list[float]] = []
    gradients: list[Parameters] = []
    for step in range(steps):
        losses.append([])
        total: Parameters = {}
        for walk in range(of.walks):
            summed: Parameters = {}
            for mb in range(header.microbatches):
                number, parts = walk * header.microbatches + mb, header.microbatches * of.walks
                for one in draws:
                    one.at = (of.seed, step, number)
                losses[-1].append(forward_backward(of, header, modules, step, number, parts))
                beat()
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
        sizes = zip(total, norms(list(total.values())), strict=True)
        once = [0.0 if name in shared_before(of.model, stage, [name]) else size for (stage, name), size in sizes]
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
    return Record(losses[begun:], gradients, {key: parameter.detach() for key, parameter in parameters.items()})


def forward_backward(
    of: Training, header: Header, modules: Sequence[Callable[..., Tensor]], step: int, number: int, parts: int
) -> float:
    """One microbatch through all stages and back; its loss. Of that the gradients are a share, one of `parts`.

    The graph is cut at the borders of stages, so that gradients which several
    stages return for one value are added in the order of these stages.
    Autograd's own order for a graph in one piece is another, and gives other
    bits though the same sum. What shards of a stage give is added in their
    order.
    """
    data, target = (x.to(of.device.torch) for x in microbatch(of.model, of.text, of.seed, step, number))
    outputs: list[Tensor] = []
    read: list[Tensor] = []  # by consumers
    leaves: list[list[Tensor]] = []
    T = header.tensor
    for stage, (module, producers) in enumerate(zip(modules, header.producers, strict=True)):
        inputs = [read[p].detach() for p in producers] or [data]
        leaves.append([x.requires_grad_(x.is_floating_point()) for x in inputs])
        with autocast(of.device.kind, of.mixed):
            outputs.append(module(*(x.clone() for x in leaves[-1])).contiguous())
        read.append(outputs[-1])
        if header.split[stage] and stage % T == T - 1:
            read[-T:] = [_sum(outputs[-T:])] * T
    with autocast(of.device.kind, of.mixed):
        losses = [of.model.loss(output, target) for output in outputs[-T:]]
    outputs[-T:] = [loss / parts for loss in losses]
    shares: list[list[Tensor]] = [[] for _ in modules]  # of each output's gradient, last consumer first
    shares[-T:] = [[torch.ones_like(loss)] for loss in losses]
    for first in range(len(modules) - T, -1, -T):
        for stage in range(first, first + T):
            if outputs[stage].requires_grad:
                gradient = shares[stage].pop()
                while shares[stage]:
                    gradient = gradient + shares[stage].pop()
                outputs[stage].backward(gradient.contiguous())
        given = [[_gradient(leaf) for leaf in of_shard] for of_shard in leaves[first : first + T]]
        if header.split[first]:
            given = [[_sum(parts) for parts in zip(*given, strict=True)]] * T
        for stage, gradients in enumerate(given, start=first):
            for producer, gradient in zip(header.producers[stage], gradients, strict=False):
                shares[producer].append(gradient)
    return losses[0].item()


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
    T = header.tensor
    plain = replace(
        header,
        scheme={**header.scheme, "stages": header.stages // T},
        edges=tuple(sorted({(p // T, c // T) for p, c in header.edges})),
        tensor=1,
        whole=(),
    )
    return of._replace(model=of.plain, shapes=[one._replace(stage=-1) for one in of.shapes[::T]]), plain


def put_together(of: Training, header: Header, record: Record) -> Record | str:
    """The record of the model that a schedule has shards of; a sentence where what should be copies differs."""
    T = header.tensor
    wrong: list[str] = []

    def whole(values: Parameters) -> Parameters:
        found: Parameters = {}
        for (stage, name), value in values.items():
            key, cut = (stage // T, name), of.shapes[stage].cuts.get(name) if header.split[stage] else None
            if cut is not None:
                found.setdefault(key, cut.join([values[shard, name] for shard in header.shards(stage)]))
            elif _bytes(found.setdefault(key, value)) != _bytes(value):
                wrong.append(f"{name} of stage {key[0]} is another in shard {stage % T} than in the first that has it")
        return found

    found = Record(record.losses, [whole(gradients) for gradients in record.gradients], whole(record.parameters))
    return wrong[0] if wrong else found


class Difference(NamedTuple):
    """The largest relative difference of one kind of number, and where it is."""

    what: str
    size: float
    where: str


def compare(ours: Record, theirs: Record) -> list[Difference]:
    """Differences of losses, gradients and parameters, |ours - theirs| / |theirs| in the 2-norm.

    A tensor counts as no smaller than float32's rounding of the whole it is
    part of, so that a gradient that should be zero is not compared with noise.
    """
    losses = Difference("losses", 0.0, "")
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        apart = np.where(np.isnan(a) & np.isnan(b), 0.0, np.abs(np.subtract(a, b)) / np.maximum(np.abs(b), 1e-30))
        size = float(np.max(apart))
        if not size <= losses.size:
            losses = Difference("losses", size, f"step {step + 1}")
    pairs = [
        (f" in step {step + 1}", a, b) for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
    ]
    return [losses, _worst("gradients", pairs), _worst("parameters", [("", ours.parameters, theirs.parameters)])]


def _worst(what: str, pairs: Sequence[tuple[str, Parameters, Parameters]]) -> Difference:
    worst = Difference(what, 0.0, "")
    for suffix, ours, theirs in pairs:
        norms = {key: float(torch.linalg.vector_norm(value.double())) for key, value in theirs.items()}
        floor = float(np.linalg.norm(list(norms.values()))) * torch.finfo(torch.float32).eps
        for key, size_of in norms.items():
            apart = float(torch.linalg.vector_norm(ours[key].double() - theirs[key].double()))
            size = 0.0 if apart == 0 else apart / max(size_of, floor, 1e-300)
            if not size <= worst.size:
                worst = Difference(what, size, f"{key[1]} of stage {key[0]}{suffix}")
    return worst


def _bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _numpy(values: Parameters) -> dict[tuple[int, str], tuple[torch.dtype, torch.Size, np.ndarray]]:
    """Tensors as bytes: pickled quickly, and of types that numpy lacks."""
    return {
        key: (v.dtype, v.shape, v.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
        for key, v in values.items()
    }


def _torch(values: dict[tuple[int, str], tuple[torch.dtype, torch.Size, np.ndarray]]) -> Parameters:
    return {key: torch.from_numpy(data).view(dtype).view(shape) for key, (dtype, shape, data) in values.items()}
