"""What a run did: the losses, gradients and parameters of one rank, and of all ranks gathered.

And how far that is from its reference's, and how much of the difference may be rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.fail_together import first_difference
from mpirun.data.values import digest_of, raw_bytes
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.setup import Setup
from mpirun.model.stage_shape import StageShape, pieces
from schedgen.ir.header import Header

Key = TypeVar("Key")
Parameters = dict[tuple[int, str], Tensor]  # by stage and name
Pieces = dict[tuple[int, str, int], Tensor]  # by stage, name and where in the flat parameter it begins


class Record(NamedTuple):
    """What a run did, or the reference that it is compared with: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; without skipped steps
    parameters: Parameters  # after the last step
    buffers: Mapping[tuple[int, str], Tensor] = {}  # after the last step: those that forwards change


class RankRecord(NamedTuple):
    """One rank's part of a record, filled while it runs."""

    losses: list[list[float]]
    gradients: list[Pieces]
    parameters: Pieces
    buffers: Parameters


def on_host(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies in host memory, where records of all devices are compared."""
    return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}


def copy_pieces(stage: LocalStage, shard: int, flat: Tensor) -> Pieces:
    """Copies of the parameters' pieces in a shard of a stage's weights; `flat`: laid out as that shard is."""
    if shard < 0:
        return {(stage.index, name, 0): view.clone() for name, view in zip(stage.names, stage.views(flat), strict=True)}
    return {
        (stage.index, stage.names[piece.parameter], piece.begin): piece.of_shard(flat).clone()
        for piece in pieces(stage.layout, stage.shard_spans[shard])
    }


def differing_copy(comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], record: RankRecord) -> str | None:
    """A sentence, if two ranks end with different values of what should be one parameter. Collective."""
    digests: dict[tuple[bool, int, str, int], str] = {}
    for (stage, name, begin), value in record.parameters.items():
        is_slice = header.tensor_parallel.sliced[stage] and name in shapes[stage].sliced_dims
        digests[is_slice, stage if is_slice else header.model_stage(stage), name, begin] = digest_of([value])
    if (difference := first_difference(comm, digests)) is None:
        return None
    (_, stage, name, _), one, other, *_ = difference
    return f"ranks {one} and {other} end with different values of {name} of stage {stage}"


def gather_record(
    comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], record: RankRecord
) -> Record | None:
    """The record of all stages on rank 0; None elsewhere. Collective.

    Gradients and parameters come from the first owner.
    """
    of_first_owner = {
        key: value
        for key, value in record.parameters.items()
        if header.is_sharded(key[0]) or header.owners[key[0]][0] == comm.rank
    }
    gradients_on_host = [on_host(gradients) for gradients in record.gradients]
    of_ranks = comm.gather((gradients_on_host, on_host(of_first_owner), record.buffers))
    if of_ranks is None:
        return None
    parameters: Pieces = {}
    gradients: list[Pieces] = [{} for _ in record.gradients]
    buffers: Parameters = {}
    for of_steps, of_rank, own_buffers in of_ranks:
        parameters |= of_rank
        buffers |= own_buffers
        for merged, of_step in zip(gradients, of_steps, strict=True):
            merged |= of_step
    joined = [_joined(shapes, step) for step in gradients]
    return Record(record.losses, joined, _joined(shapes, parameters), buffers)


def _joined(shapes: Sequence[StageShape], pieces: Pieces) -> Parameters:
    """Whole parameters, joined from their pieces, in the order of the model."""
    by_parameter: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
    for (stage, name, begin), piece in pieces.items():
        by_parameter.setdefault((stage, name), []).append((begin, piece.reshape(-1)))
    joined = {}
    for stage, shape in enumerate(shapes):
        for name, place in zip(shape.parameter_names, shape.layout, strict=True):
            ordered = sorted(by_parameter.get((stage, name), []), key=lambda piece: piece[0])
            if ordered or not place.size.numel():
                joined[stage, name] = torch.cat([piece for _, piece in ordered] or [torch.zeros(0)]).view(place.size)
    return joined


ROUNDING = 8 * torch.finfo(torch.float32).eps  # what sums in another order may differ by
Tensors = Mapping[tuple[int, str], Tensor]  # by stage and name
NARROW, MIXED, PLAIN = 5e-2, 1e-2, 1e-5  # defaults of --tolerance: 100 times float32's rounding, 6 times bf16's


class Difference(NamedTuple):
    """The largest relative difference of one kind of number, and where it is."""

    what: str
    size: float
    where: str


def compare(ours: Record, theirs: Record, left_out: Tensors | None = None) -> list[Difference]:
    """Differences of losses, gradients, parameters and buffers, relative to theirs.

    Those of a tensor are relative to the 2-norm of all of its stage: a gradient that should be zero, such as that of a
    bias before a normalisation, is nothing but rounding of its stage's gradient.

    left_out  a mask by parameter; elements that are True are not compared
    """
    losses = Difference("losses", 0.0, "")
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        same = np.equal(a, b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):  # inf - inf
            sizes = np.where(same, 0.0, np.abs(np.subtract(a, b)) / np.maximum(np.abs(b), 1e-30))
        losses = _worse(losses, float(np.max(sizes)), f"step {step + 1}")
    gradients = [
        (f" in step {step + 1}", a, b) for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
    ]
    parameters = {
        key: torch.where(left_out[key], theirs.parameters[key], value) if left_out else value
        for key, value in ours.parameters.items()
    }
    differences = [losses, _worst("gradients", gradients), _worst("parameters", [("", parameters, theirs.parameters)])]
    if ours.buffers:
        differences.append(_worst("buffers", [("", ours.buffers, {key: theirs.buffers[key] for key in ours.buffers})]))
    return differences


def same_bits(ours: Record, theirs: Record) -> bool:
    """Whether losses, gradients and parameters have the same bits; zeros of different signs differ."""
    losses = [np.array(record.losses, np.float64).tobytes() for record in (ours, theirs)]
    pairs = zip((*ours.gradients, ours.parameters), (*theirs.gradients, theirs.parameters), strict=True)

    def same(a: Parameters, b: Parameters) -> bool:
        return a.keys() == b.keys() and all(np.array_equal(raw_bytes(a[key]), raw_bytes(b[key])) for key in a)

    return losses[0] == losses[1] and all(same(*pair) for pair in pairs)


def default_tolerance(setup: Setup) -> float:
    """The relative difference that is allowed, given the types of the parameters and of autocast."""
    if any(place.dtype.itemsize < torch.float32.itemsize for shape in setup.shapes for place in shape.layout):
        return NARROW
    return MIXED if setup.autocast_dtype else PLAIN


def directionless(theirs: Record) -> dict[tuple[int, str], Tensor]:
    """Masks of the elements of parameters whose gradient in some step, if not zero, may be rounding alone.

    From such a gradient an optimizer that divides by the size of gradients makes a full step in any direction.
    """
    masks = {key: torch.zeros_like(value, dtype=torch.bool) for key, value in theirs.parameters.items()}
    for step in theirs.gradients:
        norms = _norms(step)
        for key, gradient in step.items():
            masks[key] |= (gradient != 0) & (gradient.abs() <= ROUNDING * norms[key[0]])
    return masks


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.to(torch.promote_types(value.dtype, torch.float64))))


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference; NaN equals NaN, and an infinity itself."""
    differs = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    wide = torch.promote_types(theirs.dtype, torch.float64)
    return _norm(torch.where(differs, ours.to(wide) - theirs.to(wide), 0))


def _is_exact(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _norms(values: Tensors) -> dict[int, float]:
    """By stage, the norm of all numbers that may be rounded; those that are not finite do not count."""
    norms: dict[int, list[float]] = {}
    for (stage, _), value in values.items():
        norms.setdefault(stage, []).append(0.0 if _is_exact(value) else _norm(value.nan_to_num(0, 0, 0)))
    return {stage: float(np.linalg.norm(each)) for stage, each in norms.items()}


def _worse(worst: Difference, size: float, where: str) -> Difference:
    """The worse of two differences. NaN is worse than any number."""
    return worst if size <= worst.size or np.isnan(worst.size) else worst._replace(size=size, where=where)


def _worst(what: str, pairs: Sequence[tuple[str, Tensors, Tensors]]) -> Difference:
    """The largest difference of tensors, whose values may be NaN or infinite; integers may not differ at all."""
    worst = Difference(what, 0.0, "")
    for suffix, ours, theirs in pairs:
        norms = _norms(theirs)
        for key, value in theirs.items():
            distance, norm = _distance(ours[key], value), norms[key[0]]
            size = distance / norm if norm and not _is_exact(value) else math.inf
            worst = _worse(worst, size if distance else 0.0, f"{key[1]} of stage {key[0]}{suffix}")
    return worst
