"""--verify: the same steps in one process and without any schedule, compared with what the ranks did.

The reference is the loop everyone knows: forward through all stages, loss / B,
backward, microbatch after microbatch; then clip and step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.batches import Microbatch, moved
from mpirun.device import autocast
from mpirun.loss import WholeLoss
from mpirun.model import build, shared_before
from mpirun.norms import norms, whole_norm
from mpirun.optimizer import clip_factor
from mpirun.randomness import Draws
from mpirun.shapes import Shape, whole
from mpirun.shards import pieces
from mpirun.stage import Stage
from mpirun.training import Training
from mpirun.wiring import Value, Wires
from schedgen.program import Header

Parameters = dict[tuple[int, str], Tensor]  # by stage and name
ROUNDING = 8  # times float32's: what sums in another order may differ by
Pieces = dict[tuple[int, str, int], Tensor]  # by stage, name and where in the parameter it begins


class Record(NamedTuple):
    """What a run, or a reference, did: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; not of steps that changed nothing
    parameters: Parameters  # in the end


class Mine(NamedTuple):
    """One rank's part of it."""

    losses: list[list[float]]
    gradients: list[Pieces]
    parameters: Pieces


def named(stage: Stage, via: int, flat: Tensor) -> Pieces:
    """What of a stage's parameters lies in a part by name, as copies; `flat`: laid out as the part is."""
    if via < 0:
        return {(stage.index, name, 0): view.clone() for name, view in zip(stage.names, stage.views(flat), strict=True)}
    return {
        (stage.index, stage.names[piece.parameter], piece.begin): piece.within(flat).clone()
        for piece in pieces(stage.layout, stage.spans[via])
    }


def gather(comm: MPI.Intracomm, header: Header, shapes: Sequence[Shape], record: Mine) -> Record | str | None:
    """On rank 0: the record of all stages, or a sentence where owners of a stage differ; None elsewhere.

    Each rank gives the parameters it owns; gradients come from the first owner.
    """
    hashes = {key: hashlib.sha256(_bytes(value)).hexdigest() for key, value in record.parameters.items()}
    firsts = {
        key: value
        for key, value in record.parameters.items()
        if header.parts(key[0]) != (-1,) or header.owners[key[0]][0] == comm.rank
    }
    everything = comm.gather((hashes, [_numpy(gradients) for gradients in record.gradients], _numpy(firsts)))
    if everything is None:
        return None
    parameters: Pieces = {}
    gradients: list[Pieces] = [{} for _ in record.gradients]
    for _, of_steps, final in everything:
        parameters |= _torch(final)
        for merged, one in zip(gradients, of_steps, strict=True):
            merged |= _torch(one)
    for rank, (digests, _, _) in enumerate(everything):
        for key, digest in digests.items():
            if hashlib.sha256(_bytes(parameters[key])).hexdigest() != digest:
                return f"rank {rank} ends with another {key[1]} of stage {key[0]} than the stage's first owner"
    return Record(record.losses, [_joined(shapes, one) for one in gradients], _joined(shapes, parameters))


def _joined(shapes: Sequence[Shape], pieces: Pieces) -> Parameters:
    """Whole parameters, in the order of the model."""
    found: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
    for (stage, name, begin), piece in pieces.items():
        found.setdefault((stage, name), []).append((begin, piece.reshape(-1)))
    whole = {}
    for stage, shape in enumerate(shapes):
        for name, (_, size) in zip(shape.names, shape.layout, strict=True):
            of_one = sorted(found.get((stage, name), []), key=lambda piece: piece[0])
            if of_one or not size.numel():
                whole[stage, name] = torch.cat([piece for _, piece in of_one] or [torch.zeros(0)]).view(size)
    return whole


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
    passed: list[Passed] = []
    gradients: list[Parameters] = []
    for step in range(steps):
        losses.append([])
        total: Parameters = {}
        for walk in range(of.walks):
            summed: Parameters = {}
            for mb in range(header.microbatches):
                number = walk * header.microbatches + mb
                for one in draws:
                    one.at = (of.seed, step, number)
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
    end = len(modules) - header.tensor  # shards of the last stage have the same loss
    with autocast(of.device.kind, of.mixed):
        losses = [of.model.loss(whole(passed.of(s)), passed.batch.target) for s in range(end, len(modules))]
    parts = passed.batch.parts if parts is None else parts
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
    T = header.tensor
    batch = moved(of.batches(step, number), of.device.torch)
    outputs: dict[Value, Tensor] = {}
    read: dict[Value, Tensor] = {}  # by consumers
    leaves: list[dict[Value, Tensor]] = []
    for stage, (module, sources) in enumerate(zip(modules, of.wires[0].reads, strict=True)):
        values = dict.fromkeys(one for one in sources if isinstance(one, Value))
        leaves.append({one: read[one].detach().requires_grad_(read[one].is_floating_point()) for one in values})
        given = [leaves[-1][one] if isinstance(one, Value) else batch.leaves[one.leaf] for one in sources]
        with autocast(of.device.kind, of.mixed):
            found = module(*(x.clone() if isinstance(x, Tensor) else x for x in given))
        every = [found] if isinstance(found, Tensor) else list(found)
        for index in of.shapes[stage].aliases:
            every[index] = every[index].clone()
        mine = {Value(stage, index): x.contiguous() for index, x in enumerate(every)}
        outputs |= mine
        read |= mine
        if header.split[stage] and stage % T == T - 1:
            shards = [Value(shard, 0) for shard in header.siblings(stage)]
            read |= dict.fromkeys(shards, _sum([outputs[one] for one in shards]))
    return Passed(batch, outputs, leaves)


def backward(header: Header, passed: Passed, given: Mapping[Value, Tensor | None]) -> None:
    """Back through all stages; `given`: the gradients of the last ones' outputs."""
    _, outputs, leaves = passed
    T = header.tensor
    shares: dict[Value, list[Tensor]] = {one: [] for one in outputs}  # of each gradient, last consumer first
    for one, gradient in given.items():
        if gradient is not None:
            shares[one].append(gradient)
    for first in range(len(leaves) - T, -1, -T):
        shards = range(first, first + T)
        for stage in shards:
            _through(stage, outputs, shares)
        found = [{one: _gradient(leaf) for one, leaf in leaves[s].items() if leaf.is_floating_point()} for s in shards]
        if header.split[first]:
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
    T = header.tensor
    plain = replace(
        header,
        scheme={**header.scheme, "stages": header.stages // T},
        edges=tuple(sorted({(p // T, c // T) for p, c in header.edges})),
        tensor=1,
        whole=(),
    )
    shapes = [one._replace(stage=-1) for one in of.shapes[::T]]
    reads = of.plain.wiring(plain.producers, len(of.batches(0, 0).leaves))
    wires = [Wires(reads, plain, [shape.outputs for shape in shapes])] * len(of.wires)
    return of._replace(model=of.plain, shapes=shapes, wires=wires), plain


def put_together(of: Training, header: Header, record: Record) -> Record | str:
    """The record of the model that a schedule has shards of; a sentence where what should be copies differs."""
    T = header.tensor
    wrong: list[str] = []

    def whole(values: Parameters) -> Parameters:
        found: Parameters = {}
        for (stage, name), value in values.items():
            key, cut = (stage // T, name), of.shapes[stage].cuts.get(name) if header.split[stage] else None
            if cut is not None:
                found.setdefault(key, cut.join([values[shard, name] for shard in header.siblings(stage)]))
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


def compare(ours: Record, theirs: Record, limit: float = 0.0, adaptive: bool = False) -> list[Difference]:
    """Differences of losses, gradients and parameters, |ours - theirs| / |theirs| in the 2-norm.

    A difference above `limit`, unless that is 0, may be what rounding makes of
    the whole that a tensor is part of, and then is none: a gradient that should
    be zero, as that of a bias in front of a normalisation, is nothing else. An
    `adaptive` optimizer makes whole steps of it, whose direction means nothing:
    such elements of parameters are left out.
    """
    losses = Difference("losses", 0.0, "")
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        apart = np.where(np.isnan(a) & np.isnan(b), 0.0, np.abs(np.subtract(a, b)) / np.maximum(np.abs(b), 1e-30))
        size = float(np.max(apart))
        if not size <= losses.size:
            losses = Difference("losses", size, f"step {step + 1}")
    gradients = [
        (f" in step {step + 1}", a, b) for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
    ]
    parameters = ours.parameters
    if adaptive and limit:
        parameters = {key: torch.where(_noise(key, theirs), theirs.parameters[key], a) for key, a in parameters.items()}
    last = [("", parameters, theirs.parameters)]
    return [losses, _worst("gradients", gradients, limit), _worst("parameters", last, limit)]


def _rounding(whole: Parameters) -> float:
    """What rounding may make of an element of the whole."""
    norms = [float(torch.linalg.vector_norm(value.double())) for value in whole.values()]
    return ROUNDING * float(np.linalg.norm(norms)) * torch.finfo(torch.float32).eps


def _noise(key: tuple[int, str], theirs: Record) -> Tensor:
    """Which elements of a parameter have had a gradient, not zero, that may be rounding alone."""
    found = torch.zeros_like(theirs.parameters[key], dtype=torch.bool)
    for step in theirs.gradients:
        size = step[key].abs()
        found |= (size > 0) & (size <= _rounding(step))
    return found


def _worst(what: str, pairs: Sequence[tuple[str, Parameters, Parameters]], limit: float) -> Difference:
    worst = Difference(what, 0.0, "")
    for suffix, ours, theirs in pairs:
        rounding = _rounding(theirs)
        for key, value in theirs.items():
            apart = float(torch.linalg.vector_norm(ours[key].double() - value.double()))
            size_of = float(torch.linalg.vector_norm(value.double()))
            size = 0.0 if apart == 0 else apart / max(size_of, 1e-300)
            if size > limit > 0:
                size = max(0.0, apart - rounding) / max(size_of, 1e-300)
            if not size <= worst.size:
                worst = Difference(what, size, f"{key[1]} of stage {key[0]}{suffix}")
    return worst


def _bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _numpy(values: Pieces) -> dict[tuple[int, str, int], tuple[torch.dtype, torch.Size, np.ndarray]]:
    """Tensors as bytes: pickled quickly, and of types that numpy lacks."""
    return {
        key: (v.dtype, v.shape, v.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
        for key, v in values.items()
    }


def _torch(values: dict[tuple[int, str, int], tuple[torch.dtype, torch.Size, np.ndarray]]) -> Pieces:
    return {key: torch.from_numpy(data).view(dtype).view(shape) for key, (dtype, shape, data) in values.items()}
