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

ROUNDING = 8  # times float32's epsilon: what sums in another order may differ by
EPSILON = torch.finfo(torch.float32).eps
UPDATES = 0.1  # of a parameter's change since the start: one missing step out of a few exceeds it
Tensors = Mapping[tuple[int, str], Tensor]  # by stage and name
NARROW, MIXED, PLAIN = 5e-2, 1e-2, 1e-5  # defaults of --tolerance: 100 times float32's rounding, 6 times bf16's


class Difference(NamedTuple):
    """The largest relative difference of one kind of number, and where it is."""

    what: str
    size: float
    where: str
    limit: float


def compare(
    ours: Record, theirs: Record, limit: float = 0.0, left_out: Mapping[tuple[int, str], Tensor] | None = None
) -> list[Difference]:
    """Differences of losses, gradients, parameters and buffers, |ours - theirs| / |theirs| in the 2-norm.

    limit     the allowed difference. Unless it is 0, the rounding error that a larger difference may contain is
              subtracted: a gradient that should be zero, such as that of a bias before a normalisation, is nothing but
              rounding of its stage's gradient. Unless it is 0, the updates of parameters (their changes since the
              start) are compared, too, and listed if they differ by more than UPDATES: a small step that is missing
              hardly shows in the parameters themselves.
    left_out  a mask by parameter; elements that are True are not compared
    """
    losses = Difference("losses", 0.0, "", limit)
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
    differences = [
        losses,
        _worst("gradients", gradients, limit),
        _worst("parameters", [("", parameters, theirs.parameters)], limit),
    ]
    if theirs.buffers:
        differences.append(_worst("buffers", [("", ours.buffers, theirs.buffers)], limit))
    updates = _updates(parameters, theirs)
    return differences + [updates] * (limit > 0 and not updates.size <= updates.limit)


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
    """Masks of the elements of parameters whose gradients up to some step, not all zero, may be rounding alone.

    From such a gradient an optimizer that divides by the size of earlier gradients makes a full step, in a meaningless
    direction.
    """
    masks = {key: torch.zeros_like(value, dtype=torch.bool) for key, value in theirs.parameters.items()}
    largest: Parameters = {}
    for step in theirs.gradients:
        rounding = _rounding(step)
        for key, gradient in step.items():
            size = gradient.abs()
            largest[key] = torch.maximum(largest[key], size) if key in largest else size
            masks[key] |= (largest[key] > 0) & (largest[key] <= rounding[key[0]])
    return masks


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.to(torch.promote_types(value.dtype, torch.float64))))


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference; NaN equals NaN, and an infinity itself."""
    differs = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    wide = torch.promote_types(theirs.dtype, torch.float64)
    return _norm(torch.where(differs, ours.to(wide) - theirs.to(wide), 0))


def _relative(distance: float, norm: float) -> float:
    """Infinite where nothing should be there."""
    return 0.0 if distance == 0 else distance / norm if norm else math.inf


def _is_exact(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _rounding(values: Tensors) -> dict[int, float]:
    """By stage, the error that rounding may make in an element of a parameter."""
    norms: dict[int, list[float]] = {}
    for (stage, _), value in values.items():
        norms.setdefault(stage, []).append(0.0 if _is_exact(value) else _norm(value.nan_to_num(0, 0, 0)))
    return {stage: ROUNDING * float(np.linalg.norm(each)) * EPSILON for stage, each in norms.items()}


def _worse(worst: Difference, size: float, where: str) -> Difference:
    """The worse of two differences. NaN is worse than any number."""
    return worst if size <= worst.size or np.isnan(worst.size) else worst._replace(size=size, where=where)


def _worst(what: str, pairs: Sequence[tuple[str, Tensors, Tensors]], limit: float) -> Difference:
    """The largest difference of tensors, whose values may be NaN or infinite; integers may not differ at all."""
    worst = Difference(what, 0.0, "", limit)
    for suffix, ours, theirs in pairs:
        rounding = _rounding(theirs)
        for key, value in theirs.items():
            distance, norm = _distance(ours[key], value), _norm(value.nan_to_num(0, 0, 0))
            size = _relative(distance, norm)
            if _is_exact(value) and distance:
                size = max(size, 1.0)
            elif size > limit > 0:
                size = _relative(max(0.0, distance - rounding[key[0]]), norm)
            worst = _worse(worst, size, f"{key[1]} of stage {key[0]}{suffix}")
    return worst


def _updates(ours: Parameters, theirs: Record) -> Difference:
    worst = Difference("updates", 0.0, "", UPDATES)
    for key, start in (theirs.start or {}).items():
        value = theirs.parameters[key]
        distance = max(0.0, _norm(ours[key] - value) - ROUNDING * EPSILON * _norm(value))
        size = _relative(distance, _norm(value - start))
        worst = _worse(worst, size, f"{key[1]} of stage {key[0]}")
    return worst
