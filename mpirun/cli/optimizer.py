"""The optimizer and the learning rate of the command line's options."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from mpirun.cli.options import OptimizerOptions, TrainOptions
from mpirun.engine.recipe import NamedParameter, Recipe

Class = TypeVar("Class", bound=torch.optim.Optimizer)


def optimizer(options: OptimizerOptions, named: Sequence[NamedParameter]) -> torch.optim.Optimizer:
    """AdamW or SGD."""
    parameters = [entry.parameter for entry in named]
    groups: list[dict[str, Any]] = [  # torch's fused kernels take no complex numbers
        {"params": [x for x in parameters if x.is_floating_point() == fused], "fused": fused} for fused in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer == "sgd":
        return _without_compile(torch.optim.SGD)(
            groups, options.lr, weight_decay=options.weight_decay, momentum=options.momentum
        )
    return _without_compile(torch.optim.AdamW)(groups, options.lr, weight_decay=options.weight_decay)


def recipe(options: TrainOptions) -> Recipe:
    """The optimizer, its rate by step and clipping; checkpoints record the options that differ from their defaults."""
    recorded = {
        "lr": options.lr,
        "lr-schedule": None if options.lr_schedule == "constant" else options.lr_schedule,
        "clip": options.clip,
        "warmup": options.warmup or None,
        "steps": None if options.lr_schedule == "constant" else options.steps,
    }
    rate = functools.partial(rate_of, options=options)
    factory = functools.partial(optimizer, options)
    return Recipe(factory, rate, clip=options.clip, settings=recorded, elementwise=True)


def rate_of(step: int, options: TrainOptions) -> float:
    """The learning rate of a step, counted from 0: it rises in the warm-up, then follows `lr_schedule`."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    past = (step - options.warmup) / max(1, options.steps - options.warmup)
    fall = {"constant": 1.0, "linear": 1 - past, "cosine": (1 + math.cos(math.pi * past)) / 2}
    return options.lr * fall[options.lr_schedule]


@functools.cache
def _without_compile(optimizer: type[Class]) -> type[Class]:
    """The same class without its wrappers for torch.compile, whose import takes a second on every rank."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods |= {"step": torch.no_grad()(methods["step"]), "__module__": optimizer.__module__}
    return type(optimizer.__name__, (optimizer,), methods)
