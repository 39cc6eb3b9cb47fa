"""The optimizer of the stages a rank owns, and the norm of the whole gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from mpirun.stage import Stage

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def maker(name: str, lr: float, momentum: float, weight_decay: float) -> Make:
    """What makes a torch optimizer for a list of parameters."""
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)


class Optimizer:
    def __init__(self, make: Make, stages: dict[int, Stage], clip: float | None) -> None:
        """`stages`: the owned ones. `clip`: the largest norm of the whole gradient; None: no limit."""
        self.stages, self.clip = stages, clip
        self.steppers = {index: make(stage.parameters) for index, stage in stages.items() if stage.parameters}

    def norms(self, stage: int, gradient: Tensor) -> list[float]:
        """The norm of each parameter's gradient."""
        return [norm(view) for view in self.stages[stage].views(gradient)]

    def step(self, stage: int, gradient: Tensor, norm: float) -> None:
        """One step of an owned stage, its gradient (flat, shape (n,)) clipped by the norm of the whole."""
        if stage not in self.steppers:
            return
        if self.clip is not None:
            gradient.mul_(clip_factor(norm, self.clip))
        for parameter, view in zip(self.stages[stage].parameters, self.stages[stage].views(gradient), strict=True):
            parameter.grad = view
        self.steppers[stage].step()
        for parameter in self.stages[stage].parameters:
            parameter.grad = None


def norm(gradient: Tensor) -> float:
    """The 2-norm, summed up in float32 at least."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)))


def whole_norm(norms: Sequence[float]) -> float:
    """The norm of the whole gradient from those of its parts, in the order of the model."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64))) if len(norms) else 0.0


def clip_factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, as torch.nn.utils.clip_grad_norm_ does."""
    return min(limit / (norm + 1e-6), 1.0)


def share(comm: MPI.Comm, length: int, mine: dict[int, float]) -> list[float]:
    """Numbers by place, each known to one rank only, on all ranks."""
    values = np.zeros(length)
    values[list(mine)] = list(mine.values())
    comm.Allreduce(MPI.IN_PLACE, values)  # every place has one number and zeros: exact in any order
    return [float(value) for value in values]
