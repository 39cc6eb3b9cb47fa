"""What a run, or the reference that --verify holds it against, did: gathered from all ranks, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.shapes import Shape
from mpirun.shards import pieces
from mpirun.stage import Stage
from mpirun.training import Training
from schedgen.program import Header

Parameters = dict[tuple[int, str], Tensor]  # by stage and name
ROUNDING = 8  # times float32's: what sums in another order may differ by
EPSILON = torch.finfo(torch.float32).eps
UPDATES = 0.1  # of what a parameter has changed by: less than one step of a few that is not made
NARROW, MIXED, PLAIN = 5e-2, 1e-2, 1e-5  # the default of --tolerance: a hundred times float32's rounding, or six bf16's
Pieces = dict[tuple[int, str, int], Tensor]  # by stage, name and where in the parameter it begins


class Record(NamedTuple):
    """What a run, or a reference, did: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; not of steps that changed nothing
    parameters: Parameters  # in the end
    start: Parameters | None = None  # those of a reference


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
    limit: float


def compare(
    ours: Record, theirs: Record, limit: float = 0.0, left_out: Mapping[tuple[int, str], Tensor] | None = None
) -> list[Difference]:
    """Differences of losses, gradients and parameters, |ours - theirs| / |theirs| in the 2-norm.

    A difference above `limit`, unless that is 0, may be what rounding makes of
    the stage that a tensor is part of, and then is none: a gradient that should
    be zero, as that of a bias in front of a normalisation, is nothing else.
    What parameters have changed by is compared besides, if they should not be
    equal, and listed if it differs by UPDATES of it: a small step that is not
    made is no difference of the parameters themselves.
    `left_out`: elements of parameters that are not compared, where True.
    """
    losses = Difference("losses", 0.0, "", limit)
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        apart = np.where(np.isnan(a) & np.isnan(b), 0.0, np.abs(np.subtract(a, b)) / np.maximum(np.abs(b), 1e-30))
        losses = _worse(losses, float(np.max(apart)), f"step {step + 1}")
    gradients = [
        (f" in step {step + 1}", a, b) for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
    ]
    kept = {
        key: torch.where(left_out[key], theirs.parameters[key], value) if left_out else value
        for key, value in ours.parameters.items()
    }
    found = [
        losses,
        _worst("gradients", gradients, limit),
        _worst("parameters", [("", kept, theirs.parameters)], limit),
    ]
    updates = _updates(kept, theirs)
    return found + [updates] * (limit > 0 and not updates.size <= updates.limit)


def tolerance(of: Training) -> float:
    """What may differ by default: as much as the types that are computed in say."""
    if any(shape.type.itemsize < torch.float32.itemsize for shape in of.shapes):
        return NARROW
    return MIXED if of.mixed else PLAIN


def directionless(theirs: Record) -> dict[tuple[int, str], Tensor]:
    """Which elements of parameters had, up to some step, no gradients but zeros and what may be rounding alone.

    Of such a gradient an optimizer that divides by the size of those before makes
    a whole step, whose direction means nothing.
    """
    found = {key: torch.zeros_like(value, dtype=torch.bool) for key, value in theirs.parameters.items()}
    largest: Parameters = {}
    for step in theirs.gradients:
        rounding = _rounding(step)
        for key, gradient in step.items():
            size = gradient.abs()
            largest[key] = torch.maximum(largest[key], size) if key in largest else size
            found[key] |= (largest[key] > 0) & (largest[key] <= rounding[key[0]])
    return found


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.to(torch.promote_types(value.dtype, torch.float64))))


def _rounding(values: Parameters) -> dict[int, float]:
    """By stage, what rounding may make of an element of it."""
    norms: dict[int, list[float]] = {}
    for (stage, _), value in values.items():
        norms.setdefault(stage, []).append(_norm(value))
    return {stage: ROUNDING * float(np.linalg.norm(each)) * EPSILON for stage, each in norms.items()}


def _worse(worst: Difference, size: float, where: str) -> Difference:
    """What is no number is worse than any number."""
    return worst if size <= worst.size or np.isnan(worst.size) else worst._replace(size=size, where=where)


def _worst(what: str, pairs: Sequence[tuple[str, Parameters, Parameters]], limit: float) -> Difference:
    worst = Difference(what, 0.0, "", limit)
    for suffix, ours, theirs in pairs:
        rounding = _rounding(theirs)
        for key, value in theirs.items():
            apart, whole = _norm(ours[key] - value), _norm(value)
            size = 0.0 if apart == 0 else apart / max(whole, 1e-300)
            if size > limit > 0:
                size = max(0.0, apart - rounding[key[0]]) / max(whole, 1e-300)
            worst = _worse(worst, size, f"{key[1]} of stage {key[0]}{suffix}")
    return worst


def _updates(ours: Parameters, theirs: Record) -> Difference:
    worst = Difference("updates", 0.0, "", UPDATES)
    for key, start in (theirs.start or {}).items():
        value = theirs.parameters[key]
        apart = max(0.0, _norm(ours[key] - value) - ROUNDING * EPSILON * _norm(value))
        size = 0.0 if apart == 0 else apart / max(_norm(value - start), 1e-300)
        worst = _worse(worst, size, f"{key[1]} of stage {key[0]}")
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
