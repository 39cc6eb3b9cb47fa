"""How far the record of a run is from its reference's, and how much of the difference may be rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpirun.data.values import raw_bytes
from mpirun.engine.setup import Setup
from mpirun.verify.record import Parameters, Record

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
