"""What a step does with gradients: the optimizer, made by a factory, its learning rate by step, and clipping.

A factory makes torch optimizers, one or a list, for the parameters that it is given: on a rank those of one unit that
the rank owns (a stage, or a shard of its weights), in the single process of --verify those of the whole model. What no
optimizer has is not trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler

from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError

SPREAD = 2654435761  # odd, so that steps differ in the lower 32 bits of a seed: torch's CPU generator uses no more
# Torch's classes, not their subclasses, that step pieces of a parameter as they step the whole.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
NO_OPTIONS = ("params", "param_names", "foreach", "fused")  # of a parameter group: the last two choose kernels


class NamedParameter(NamedTuple):
    """A trained parameter that a rank owns, or a piece of one, as an optimizer's factory is given it.

    name       in the whole model, as checkpoints call it
    parameter  what the optimizer steps: the whole parameter, a piece of it, shape (n,), or () if the parameter has no
               dimensions, or a tensor slice's share of it
    shape      of the whole parameter
    whole      False: `parameter` is a piece, because several ranks own shards of the stage's weights, or the share of a
               tensor slice, divided along one dimension
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    whole: bool


Several = Sequence[torch.optim.Optimizer]
Factory = Callable[[Sequence[NamedParameter]], torch.optim.Optimizer | Several]


@dataclass(frozen=True)
class Recipe:
    """An optimizer's factory, its learning rate, and gradient clipping.

    rate         of a step, counted from 0, for all parameter groups; None: the rate that the factory sets
    scheduler    makes a torch scheduler for an optimizer, stepped once per step; None: there is none. It begins with
                 the `rate` of the first step
    clip         the largest norm of the whole gradient; None: no limit
    settings     what checkpoints record, by option
    elementwise  the user says that the optimizer steps element by element
    """

    factory: Factory
    rate: Callable[[int], float] | None = None
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    clip: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    elementwise: bool = False

    def make(self, named: Sequence[NamedParameter], seed: int = 0, shard: int = -1) -> SteppedOptimizer:
        """The optimizers of these parameters; UsageError if one has others.

        `seed`: the run's, for optimizers that draw numbers; `shard`: of the stage's weights; -1: they are not divided.
        """
        made = self.factory(named)
        optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        names = {id(entry.parameter): entry.name for entry in named}
        held = {id(parameter) for group in groups_of(optimizers) for parameter in group["params"]}
        if held - names.keys():
            raise UsageError("the optimizer has other parameters than it is given: take those of the NamedParameters")
        others = [type(each).__name__ for each in optimizers if not (self.elementwise or type(each) in ELEMENTWISE)]
        for piece in [entry.name for entry in named if others and not entry.whole]:
            raise UsageError(
                f"several ranks divide {piece}, and {others[0]} is none of torch.optim's classes that step "
                "element by element: say Engine(elementwise=True) if it does, or divide no weights (shards 1, tensor 1)"
            )
        left_out = {name for x, name in names.items() if x not in held}
        return SteppedOptimizer(self, optimizers, derived_seed(seed, shard + 1, named[0].name), left_out)


class SteppedOptimizer:
    """The torch optimizers of some parameters, which are stepped with the learning rate of the step."""

    def __init__(self, recipe: Recipe, optimizers: Several, seed: int, left_out: set[str]) -> None:
        """`optimizers`: what the recipe's factory made; `seed`: equal on ranks that step copies of its parameters.

        `left_out`: the names of the parameters that none of them has.
        """
        self.recipe, self.optimizers, self.seed, self.left_out = recipe, optimizers, seed, left_out
        self.options = group_options(optimizers)  # before the schedulers, which may change them from step to step
        self.schedulers: list[LRScheduler] = []  # of the optimizers, from the first step on
        self.scheduled = 0  # steps that the schedulers have taken

    def step(self, step: int, seed: Callable[[int], None] = seed_generators, update: int = 0) -> None:
        """Step with the learning rate of `step`, counted from 0, and the random numbers of its update number `update`.

        `seed` seeds the generators, so that owners of copies draw the same numbers, whatever else their ranks do.
        """
        self.set_rate(step)
        seed((self.seed + step * SPREAD + update) % 2**63)
        for optimizer in self.optimizers:
            optimizer.step()

    def set_rate(self, step: int) -> None:
        """Set the learning rate of `step`."""
        recipe = self.recipe
        if recipe.rate is not None and not self.schedulers:
            rate = recipe.rate(step)
            for group in groups_of(self.optimizers):
                group["lr"] = rate
        if recipe.scheduler is not None and not self.schedulers:
            self.schedulers = [recipe.scheduler(optimizer) for optimizer in self.optimizers]
        if self.schedulers and self.scheduled < step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if, after --resume, it is stepped before the optimizer
                for _ in range(self.scheduled, step):
                    for scheduler in self.schedulers:
                        scheduler.step()
                self.scheduled = step

    def kept_elsewhere(self) -> list[str]:
        """Names of what a state_dict has and checkpoints lack: options that steps change, and state of no parameter.

        A scheduler changes options, too, again after a restart: with one they are not looked at.
        """
        groups = (
            [] if self.recipe.scheduler else zip_longest(self.options, group_options(self.optimizers), fillvalue={})
        )
        changed = {key for was, now in groups for key in now if key != "lr" and now[key] != was.get(key)}
        others = [f"state of {key}" for each in self.optimizers for key in each.state if not isinstance(key, Tensor)]
        return [*sorted(changed), *others]

    @property
    def rate(self) -> float:
        """The learning rate of the first group, as it is now; 0 if it has none, as Adafactor may choose one itself."""
        rate = self.optimizers[0].param_groups[0].get("lr")
        return 0.0 if rate is None else float(rate)


def is_plain(value: object) -> bool:
    """Whether a checkpoint's manifest can record a value."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)


def group_options(optimizers: Several) -> list[dict[str, Any]]:
    """The options of each parameter group that has parameters; tensors of one element as numbers."""
    return [
        {
            key: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
            for key, x in group.items()
            if key not in NO_OPTIONS
        }
        for group in groups_of(optimizers)
    ]


def groups_of(optimizers: Several) -> list[dict[str, Any]]:
    """The parameter groups that have parameters."""
    return [group for each in optimizers for group in each.param_groups if group["params"]]
