"""The optimizer of the stages, and parts of stages, that a rank owns, and its learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.transport import Transport
from mpirun.engine.grad_buffer import Gradient, Part
from mpirun.engine.stage import Stage
from mpirun.engine.weight_shards import Unit

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def plainly(kind: type[Kind]) -> type[Kind]:
    """The same optimizer without what torch.compile needs of it: to import that takes a second on every rank."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(methods["step"])})


ADAMW, SGD = plainly(torch.optim.AdamW), plainly(torch.optim.SGD)


class Recipe(NamedTuple):
    """Which optimizer, and its learning rate by step."""

    name: str  # adamw or sgd
    lr: float
    momentum: float
    weight_decay: float
    schedule: str  # constant, linear or cosine: how the rate falls from the end of the warm-up to the last step
    warmup: int  # steps in which it rises
    steps: int  # of the whole run
    clip: float | None  # largest norm of the whole gradient; None: no limit

    def make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        fused = all(parameter.is_floating_point() for parameter in parameters)  # torch fuses no complex numbers
        decay = self.weight_decay
        if self.name == "sgd":
            return SGD(parameters, self.lr, momentum=self.momentum, weight_decay=decay, fused=fused)
        return ADAMW(parameters, self.lr, weight_decay=decay, fused=fused)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        past = (step - self.warmup) / max(1, self.steps - self.warmup)
        fall = {"constant": 1.0, "linear": 1 - past, "cosine": (1 + math.cos(math.pi * past)) / 2}
        return self.lr * fall[self.schedule]

    def step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        optimizer.step()


class Optimizer:
    def __init__(self, recipe: Recipe, stages: dict[int, Stage]) -> None:
        """`stages`: those of which it owns some part."""
        self.recipe, self.stages = recipe, stages
        # The optimizer's own names for the parameters, or their pieces in a part: what they refer to may become
        # another version's.
        self.parameters = {
            (index, via): [nn.Parameter(one.detach()) for one in stage.in_part(via, stage.own[via])]
            for index, stage in stages.items()
            for via in stage.own
        }
        self.steppers = {unit: recipe.make(parameters) for unit, parameters in self.parameters.items() if parameters}
        self.bound: dict[Unit, Stage] = {}  # whose weights they refer to now
        self.gathered: dict[Unit, Tensor] = {}  # sums over the walks through the list so far

    def gather(self, totals: dict[Unit, Tensor], first: bool, last: bool) -> None:
        """Add a walk's gradients to those before; in the last walk `totals` become the sums."""
        for unit, total in totals.items():
            if first:
                self.gathered.setdefault(unit, torch.empty_like(total)).copy_(total)
            elif last:
                torch.add(self.gathered[unit], total, out=total)
            else:
                self.gathered[unit] += total

    def kept(self, unit: Unit) -> list[dict[str, Tensor]]:
        """What is kept of each parameter, or piece of one, beside its value, by torch's names."""
        if unit not in self.steppers:
            return []
        by_index = self.steppers[unit].state_dict()["state"]
        return [
            {key: torch.as_tensor(value) for key, value in by_index.get(index, {}).items() if value is not None}
            for index in range(len(self.parameters[unit]))
        ]

    def restore(self, unit: Unit, kept: Sequence[dict[str, Tensor]]) -> None:
        """What `kept` gave."""
        if unit in self.steppers:
            stepper = self.steppers[unit]
            by_index = {index: of_one for index, of_one in enumerate(kept) if of_one}
            stepper.load_state_dict({**stepper.state_dict(), "state": by_index})

    def step(self, unit: Unit, gradient: Gradient | Part, step: int, norm: float, version: Stage | None = None) -> None:
        """One step of what is owned, its gradient clipped by the whole norm. `version`: whose weights change."""
        if unit not in self.steppers:
            return
        if self.recipe.clip is not None:
            gradient.total.mul_(clip_factor(norm, self.recipe.clip))
        stage, via = unit
        of = self.stages[stage] if version is None else version
        if self.bound.get(unit) is not of:
            self.bound[unit] = of
            weights = of.weights if via < 0 else of.own[via]
            views = zip(self.parameters[unit], of.in_part(via, weights), of.in_part(via, gradient.total), strict=True)
            for parameter, view, grad in views:
                parameter.data, parameter.grad = view, grad
        self.recipe.step(self.steppers[unit], step)


def clip_factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, as torch.nn.utils.clip_grad_norm_ does."""
    return min(limit / (norm + 1e-6), 1.0)


def share(transport: Transport, comm: MPI.Intracomm, length: int, mine: dict[int, float]) -> list[float]:
    """Numbers by place, each known to one rank only, on all ranks."""
    values, known = np.zeros(length), np.empty(length)
    values[list(mine)] = list(mine.values())
    transport.wait(comm.Iallreduce(values, known).Test)  # every place has one number and zeros: exact in any order
    return list(map(float, known))
