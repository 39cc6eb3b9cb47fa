"""What a step does with gradients: the optimizer, made by a factory, its learning rate by step, and clipping.

A factory makes one torch optimizer for the parameters that it is given: on a rank those of one unit that the rank owns
(a stage, or a shard of its weights), in the single process of --verify those of the whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler

from mpirun.model.meta_values import like_parameter
from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError, clip

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


Factory = Callable[[Sequence[NamedParameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """An optimizer's factory, its learning rate, and gradient clipping.

    rate         of a step, counted from 0, for all parameter groups; None: the rate that the factory sets
    scheduler    makes a torch scheduler for an optimizer, stepped once per step; None: there is none
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
        """The optimizer of these parameters; UsageError if the factory does not make one for all of them.

        `seed`: the run's, for optimizers that draw numbers; `shard`: of the stage's weights; -1: they are not divided.
        """
        made = self.factory(named)
        held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
        missing = [entry.name for entry in named if id(entry.parameter) not in held]
        if missing:
            raise UsageError(
                f"the optimizer leaves out {clip(', '.join(missing))}: freeze what is not to be trained (requires_grad)"
            )
        rates = {str(options.get("lr")) for options in group_options(made)}
        if self.rate is not None and len(rates) > 1:
            raise UsageError(
                f"the optimizer's groups have the rates {clip(', '.join(sorted(rates)))}, but lr sets one for all of "
                "them: leave lr out, and change them from step to step by scheduler="
            )
        if not all(entry.whole for entry in named):
            self._check_pieces(named, made)
        return SteppedOptimizer(self, made, derived_seed(seed, shard + 1, named[0].name))

    def _check_pieces(self, named: Sequence[NamedParameter], made: torch.optim.Optimizer) -> None:
        """UsageError unless pieces of parameters are stepped element by element, and with the options of the whole."""
        piece = next(entry.name for entry in named if not entry.whole)
        if not (self.elementwise or type(made) in ELEMENTWISE):
            raise UsageError(
                f"several ranks divide {piece}, and {type(made).__name__} is none of torch.optim's classes that step "
                "element by element: say Engine(elementwise=True) if it does, or compile without --shards and --tensor"
            )
        wholes = [
            entry._replace(parameter=like_parameter(x, x.new_zeros(()).expand(entry.shape)), whole=True)
            for entry in named
            for x in [entry.parameter]
        ]
        of_wholes = _options_by_name(replace(self, scheduler=None).make(wholes).optimizer, wholes)
        if _options_by_name(made, named) != of_wholes:
            raise UsageError(
                f"the optimizer's groups have other options for pieces of parameters, as of {piece}, than for the "
                "whole: choose them by the names and shapes of NamedParameters"
            )


class SteppedOptimizer:
    """A torch optimizer that is stepped with the learning rate of the step."""

    def __init__(self, recipe: Recipe, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """`optimizer`: what the recipe's factory made; `seed`: equal on ranks that step copies of its parameters."""
        self.recipe, self.optimizer, self.seed = recipe, optimizer, seed
        self.options = group_options(optimizer)  # before the scheduler, which may change them from step to step
        self.scheduler = None if recipe.scheduler is None else recipe.scheduler(optimizer)
        self.scheduled = 0  # steps that the scheduler has taken

    def step(self, step: int, seed: Callable[[int], None] = seed_generators, update: int = 0) -> None:
        """Step with the learning rate of `step`, counted from 0, and the random numbers of its update number `update`.

        `seed` seeds the generators, so that owners of copies draw the same numbers, whatever else their ranks do.
        """
        self.set_rate(step)
        seed((self.seed + step * SPREAD + update) % 2**63)
        self.optimizer.step()

    def set_rate(self, step: int) -> None:
        """Set the learning rate of `step`."""
        if self.recipe.rate is not None:
            rate = self.recipe.rate(step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        elif self.scheduler is not None and self.scheduled < step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if, after --resume, it is stepped before the optimizer
                while self.scheduled < step:
                    self.scheduler.step()
                    self.scheduled += 1

    def kept_elsewhere(self) -> list[str]:
        """Names of what its state_dict has and checkpoints lack: options that steps change, and state of no parameter.

        A scheduler changes options, too, again after a restart: with one they are not looked at.
        """
        groups = [] if self.scheduler is not None else zip(self.options, group_options(self.optimizer), strict=True)
        changed = {key for was, now in groups for key in now if key != "lr" and now[key] != was.get(key)}
        return [*sorted(changed), *(f"state of {key}" for key in self.optimizer.state if not isinstance(key, Tensor))]

    @property
    def rate(self) -> float:
        """The learning rate of the first group, as it is now; 0 if it has none, as Adafactor may choose one itself."""
        rate = self.optimizer.param_groups[0].get("lr")
        return 0.0 if rate is None else float(rate)


def is_plain(value: object) -> bool:
    """Whether a checkpoint's manifest can record a value."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group that has parameters; tensors of one element as numbers."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    return [
        {
            key: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
            for key, x in group.items()
            if key not in NO_OPTIONS
        }
        for group in groups
    ]


def _options_by_name(optimizer: torch.optim.Optimizer, named: Sequence[NamedParameter]) -> dict[str, dict[str, Any]]:
    names = {id(entry.parameter): entry.name for entry in named}
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    options = zip(groups, group_options(optimizer), strict=True)
    return {names[id(parameter)]: of_group for parameters, of_group in options for parameter in parameters}
