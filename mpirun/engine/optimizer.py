"""The optimizer: torch's AdamW or SGD over the weights that a rank owns, its learning rate and gradient clipping."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mpirun.engine.grad_buffers import GradBuffer
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import Unit

Class = TypeVar("Class", bound=torch.optim.Optimizer)


def without_compile(optimizer: type[Class]) -> type[Class]:
    """The same class without its wrappers for torch.compile: importing that takes a second on every rank."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    return type(optimizer.__name__, (optimizer,), methods | {"step": torch.no_grad()(methods["step"])})


ADAMW, SGD = without_compile(torch.optim.AdamW), without_compile(torch.optim.SGD)


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
        """The optimizer of these parameters."""
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
        """Step `optimizer` with the learning rate of `step`, counted from 0."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        optimizer.step()


class Optimizer:
    """One torch optimizer for every unit that a rank owns: a stage, or a part of its weights."""

    def __init__(self, recipe: Recipe, stages: Mapping[int, LocalStage]) -> None:
        """`stages`: those of which the rank owns all weights or some parts."""
        self.recipe, self.stages = recipe, stages
        # Parameters, or pieces of them, that only the optimizers refer to: a STEP points them to a version's weights.
        self.parameters = {
            (index, part): [nn.Parameter(view.detach()) for view in stage.views_of_part(part, stage.owned[part])]
            for index, stage in stages.items()
            for part in stage.owned
        }
        self.by_unit = {unit: recipe.make(parameters) for unit, parameters in self.parameters.items() if parameters}
        self.points_to: dict[Unit, LocalStage] = {}  # the stage, or version of it, whose weights they are now
        self.accumulated: dict[Unit, Tensor] = {}  # gradients, summed over the passes of this step so far

    def accumulate(self, totals: dict[Unit, Tensor], first: bool, last: bool) -> None:
        """Add the gradients of an accumulation pass to those before; in the last pass `totals` become the sums."""
        for unit, total in totals.items():
            if first:
                self.accumulated.setdefault(unit, torch.empty_like(total)).copy_(total)
            elif last:
                torch.add(self.accumulated[unit], total, out=total)
            else:
                self.accumulated[unit] += total

    def state(self, unit: Unit) -> list[dict[str, Tensor]]:
        """The optimizer's state for each parameter of a unit, or piece of one, by torch's names (exp_avg, ...)."""
        if unit not in self.by_unit:
            return []
        by_index = self.by_unit[unit].state_dict()["state"]
        return [
            {key: torch.as_tensor(value) for key, value in by_index.get(index, {}).items() if value is not None}
            for index in range(len(self.parameters[unit]))
        ]

    def restore(self, unit: Unit, state: Sequence[dict[str, Tensor]]) -> None:
        """Set the state of a unit to what `state` gave."""
        if unit in self.by_unit:
            optimizer = self.by_unit[unit]
            by_index = {index: values for index, values in enumerate(state) if values}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": by_index})

    def step(self, unit: Unit, gradient: GradBuffer, step: int, norm: float, version: LocalStage | None = None) -> None:
        """Step the weights of a unit, after clipping its gradient by the norm of the whole gradient.

        `version`: the stage with the version of its weights that changes; None: the weights at the start of a pass.
        """
        if unit not in self.by_unit:
            return
        if self.recipe.clip is not None:
            gradient.total.mul_(clip_factor(norm, self.recipe.clip))
        index, part = unit
        stage = self.stages[index] if version is None else version
        if self.points_to.get(unit) is not stage:
            self.points_to[unit] = stage
            weights = stage.weights if part < 0 else stage.owned[part]
            views, grads = stage.views_of_part(part, weights), stage.views_of_part(part, gradient.total)
            for parameter, view, grad in zip(self.parameters[unit], views, grads, strict=True):
                parameter.data, parameter.grad = view, grad
        self.recipe.step(self.by_unit[unit], step)


def clip_factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, as torch.nn.utils.clip_grad_norm_ does."""
    return min(limit / (norm + 1e-6), 1.0)
