"""How far a run is from its reference, and what of that may be rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpirun.engine.setup import Training
from mpirun.verify.record import Parameters, Record

ROUNDING = 8  # times float32's: what sums in another order may differ by
EPSILON = torch.finfo(torch.float32).eps
UPDATES = 0.1  # of what a parameter has changed by: less than one step of a few that is not made
NARROW, MIXED, PLAIN = 5e-2, 1e-2, 1e-5  # the default of --tolerance: a hundred times float32's rounding, or six bf16's


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
    if any(shape.dtype.itemsize < torch.float32.itemsize for shape in of.shapes):
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
