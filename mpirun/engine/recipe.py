"""What a step does with gradients: the optimizer, made by a factory, its learning rate by step, and clipping.

A factory makes one torch optimizer for the parameters that it is given: on a rank those of one unit that the rank owns
(a stage, or a part of its weights), in the single process of --verify those of the whole model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mpirun.engine.options import SetupOptions
from mpirun.model.meta_values import like_parameter
from mpirun.model.parallel_layers import Shard, ShardedDim
from mpirun.model.parameter_checks import hooked_by
from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError, clip, raised

Class = TypeVar("Class", bound=torch.optim.Optimizer)
SPREAD = 2654435761  # odd, so that steps differ in the lower 32 bits of a seed: torch's CPU generator uses no more
PROBED = 4  # elements per dimension, at most, of the small parameter that stands for a divided one
# Scales of its gradients, each with a learning rate that makes steps of SGD show; large gradients may be clipped.
PROBED_SCALES = ((1, 0.1), (1e-3, 100), (1e3, 0.1))
NO_OPTIONS = ("params", "param_names", "foreach", "fused")  # of a parameter group: the last two choose kernels


class NamedParameter(NamedTuple):
    """A trained parameter that a rank owns, or a piece of one, as an optimizer's factory is given it.

    name       in the whole model, as checkpoints call it
    parameter  what the optimizer steps: the whole parameter, a piece of it, shape (n,), or () if the parameter has no
               dimensions, or a tensor shard's share of it
    shape      of the whole parameter
    whole      False: `parameter` is a piece, because several ranks own parts of the stage's weights, or the share of a
               tensor shard, divided along one dimension
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    whole: bool


Factory = Callable[[Sequence[NamedParameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """An optimizer's factory, its learning rate, and gradient clipping.

    rate       of a step, counted from 0, for all parameter groups; None: the rate that the factory sets
    scheduler  makes a torch scheduler for an optimizer, stepped once per step; None: there is none
    clip       the largest norm of the whole gradient; None: no limit
    name       of the optimizer in checkpoints; empty: the class that the factory makes
    settings   what checkpoints record, by option, besides the optimizer's defaults
    """

    factory: Factory
    rate: Callable[[int], float] | None = None
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    clip: float | None = None
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, named: Sequence[NamedParameter], seed: int = 0, part: int = -1) -> SteppedOptimizer:
        """The optimizer of these parameters; UsageError if the factory does not make one for all of them.

        `seed`: the run's, for optimizers that draw numbers; `part`: of the stage's weights; -1: they are not divided.
        """
        try:
            made = self.factory(named)
        except (Exception, SystemExit) as error:
            raise UsageError(f"the optimizer cannot be made: {raised(error)}") from None
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer's factory should return a torch.optim.Optimizer, not {type(made).__name__}"
            )
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UsageError(
                f"{type(made).__name__} computes gradients inside step(), which no schedule allows: use another one"
            )
        for name, parameter, *_ in named:
            if method := hooked_by(parameter):
                raise UsageError(
                    f"the optimizer's factory gives {name} a hook ({method}), which a stage would not call"
                )
            if not parameter.requires_grad:
                raise UsageError(
                    f"the optimizer's factory freezes {name}: freeze it in the model, before the first step"
                )
        held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
        missing = [entry.name for entry in named if id(entry.parameter) not in held]
        if missing:
            raise UsageError(
                f"the optimizer leaves out {clip(', '.join(missing))}: freeze what is not to be trained (requires_grad)"
            )
        if len(held) > len(named):
            raise UsageError("the optimizer has parameters that its factory was not given")
        return SteppedOptimizer(self, made, derived_seed(seed, part + 1, named[0].name))


class SteppedOptimizer:
    """A torch optimizer that is stepped with the learning rate of the step."""

    def __init__(self, recipe: Recipe, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """`optimizer`: what the recipe's factory made; `seed`: equal on ranks that step copies of its parameters."""
        self.recipe, self.optimizer, self.seed = recipe, optimizer, seed
        self.options = group_options(optimizer)  # before the scheduler, which may change them from step to step
        self.scheduler = None if recipe.scheduler is None else _scheduler(recipe.scheduler, optimizer)
        self.scheduled = 0  # steps that the scheduler has taken
        # Names of the entries of parameter groups that steps change.
        self.set_names = set() if recipe.rate is None and recipe.scheduler is None else {"lr"}

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
                    before = [dict(group) for group in self.optimizer.param_groups]
                    self.scheduler.step()
                    self.scheduled += 1
                    for group, was in zip(self.optimizer.param_groups, before, strict=True):
                        self.set_names |= {name for name in group if group[name] is not was.get(name)}

    @property
    def rate(self) -> float:
        """The learning rate of the first group, as it is now; 0 if it has none, as Adafactor may choose one itself."""
        rate = self.optimizer.param_groups[0].get("lr")
        return 0.0 if rate is None else float(rate)


def _scheduler(make: Callable[[torch.optim.Optimizer], LRScheduler], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The scheduler; UsageError unless its learning rate depends on the step alone."""
    for group in optimizer.param_groups:  # schedulers change tensors in place, which other optimizers may share
        group |= {name: value.clone() for name, value in group.items() if isinstance(value, Tensor)}
    try:
        scheduler = make(optimizer)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the scheduler cannot be made: {raised(error)}") from None
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            f"a {type(scheduler).__name__} does not tell the learning rate by the step: scheduler should make a torch "
            "LRScheduler other than ReduceLROnPlateau"
        )
    return scheduler


def command_line_rate(step: int, options: SetupOptions) -> float:
    """The learning rate of a step, counted from 0: it rises in the warm-up, then follows `lr_schedule`."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    past = (step - options.warmup) / max(1, options.steps - options.warmup)
    fall = {"constant": 1.0, "linear": 1 - past, "cosine": (1 + math.cos(math.pi * past)) / 2}
    return options.lr * fall[options.lr_schedule]


def command_line_recipe(options: SetupOptions) -> Recipe:
    """AdamW or SGD, as given by the options of `python -m mpirun`."""
    kind = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.AdamW

    def factory(named: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        parameters = [entry.parameter for entry in named]
        groups: list[dict[str, Any]] = [  # torch's fused kernels take no complex numbers
            {"params": [x for x in parameters if x.is_floating_point() == fused], "fused": fused}
            for fused in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        momentum = {"momentum": options.momentum} if options.optimizer == "sgd" else {}
        return without_compile(kind)(groups, options.lr, weight_decay=options.weight_decay, **momentum)

    settings = {
        "lr": options.lr,
        "lr-schedule": None if options.lr_schedule == "constant" else options.lr_schedule,
        "clip": options.clip,
        "warmup": options.warmup or None,
        "steps": None if options.lr_schedule == "constant" else options.steps,
    }
    rate = functools.partial(command_line_rate, options=options)
    return Recipe(factory, rate, None, options.clip, class_name(kind), settings)


def class_name(optimizer: type[torch.optim.Optimizer]) -> str:
    """The name of an optimizer's class in checkpoints."""
    return f"{optimizer.__module__}.{optimizer.__qualname__}"


@functools.cache
def without_compile(optimizer: type[Class]) -> type[Class]:
    """The same class without its wrappers for torch.compile, whose import takes a second on every rank."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    return type(optimizer.__name__, (optimizer,), methods | {"step": torch.no_grad()(methods["step"])})


def is_plain(value: object) -> bool:
    """Whether a checkpoint's manifest can record a value."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group that has parameters; tensors of one element as numbers, tuples as lists."""
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if group["params"]:
            values = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            values |= {key: x.item() for key, x in values.items() if isinstance(x, Tensor) and x.numel() == 1}
            values |= {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
            found.append({key: value for key, value in values.items() if is_plain(value)})
    return found


class _Probe:
    """A small parameter like `piece`, with two gradients, which an optimizer steps whole and in halves."""

    def __init__(self, recipe: Recipe, piece: NamedParameter, dim: ShardedDim | None) -> None:
        """`dim`: how tensor shards divide the parameter; None: pieces are flat."""
        self.recipe, self.piece, self.dim = recipe, piece, dim
        sizes = [min(size, PROBED) for size in piece.shape]
        if dim is not None:
            sizes[dim.dim] = 2 * dim.blocks
        generator = torch.Generator().manual_seed(0)
        self.start, *self.gradients = (torch.randn(sizes, generator=generator).to(piece.parameter) for _ in range(3))
        self.optimizer = "the optimizer"  # in words

    def halves(self, x: Tensor) -> Sequence[Tensor]:
        if not x.dim():
            return [x]
        return x.reshape(-1).tensor_split(2) if self.dim is None else [self.dim.share(x, Shard(t, 2)) for t in range(2)]

    def made(self, x: Tensor, whole: bool) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = like_parameter(self.piece.parameter, x.clone())
        named = NamedParameter(self.piece.name, parameter, self.piece.shape, whole)
        with contextlib.redirect_stdout(io.StringIO()):  # a factory that prints would do so for every parameter
            optimizer = self.recipe.make([named]).optimizer
        self.optimizer = f"the optimizer {type(optimizer).__name__}"
        return parameter, optimizer

    def options(self, x: Tensor, whole: bool) -> tuple[dict[str, Any], list[str]]:
        """All, and those that have to be equal: a factory may add others, which its optimizer does not read."""
        optimizer = self.made(x, whole)[1]
        (found,) = group_options(optimizer)
        return found, [key for key in optimizer.defaults if key != "lr" or self.recipe.rate is None]

    def stepped(self, x: Tensor, whole: bool, gradients: Sequence[Tensor], rate: float) -> Tensor:
        parameter, optimizer = self.made(x, whole)
        for group in optimizer.param_groups:
            group["lr"] = 0 * group["lr"] + rate
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach().double()

    def steps_alike(self, scale: float, rate: float) -> bool:
        """Whether gradients of this size, at this learning rate, change the halves as they change the whole."""
        scaled = [gradient * scale for gradient in self.gradients]
        whole = self.halves(self.stepped(self.start, True, scaled, rate))
        parts = [
            self.stepped(half, False, of_half, rate)
            for half, *of_half in zip(self.halves(self.start), *map(self.halves, scaled), strict=True)
        ]
        close = functools.partial(torch.allclose, rtol=1e-3, atol=1e-5 * rate * max(scale, 1), equal_nan=scale != 1)
        return all(map(close, parts, whole))


def check_steps_pieces(recipe: Recipe, piece: NamedParameter, dim: ShardedDim | None, tried: set[str]) -> None:
    """UsageError unless the optimizer steps pieces of a parameter as it steps the whole: element by element.

    Tried on a small parameter with the name of `piece`: the whole and its halves should have the same options, and the
    same values after two steps with small, usual and large gradients, at learning rates that make differences show.

    dim    how tensor shards divide the parameter; None: pieces are flat
    tried  sorts of parameters that are not stepped again: how they are divided, whether they have rows, options
    """
    probe, differing, same = _Probe(recipe, piece, dim), list[str](), True
    why, option = "several ranks own its stage's weights", "--shards"
    if dim is not None:
        why, option = "its stage has tensor shards", "--tensor"
    refused = f"steps pieces of {piece.name} differently from the whole, and {why}: compile without {option}"
    try:
        own, equal = probe.options(probe.start, True)
        for half in probe.halves(probe.start):
            other, _ = probe.options(half, False)
            differing += [key for key in equal if own.get(key) != other.get(key)]
        kind = repr((dim, len(piece.shape) > 1, {**own, "lr": None}))
        for scale, rate in () if differing or kind in tried else PROBED_SCALES:
            same &= probe.steps_alike(scale, rate)
        tried.add(kind)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{probe.optimizer} {refused} ({raised(error)})") from None
    if differing:
        raise UsageError(
            f"{probe.optimizer} has another {differing[0]} for pieces of {piece.name} than for the whole, and {why}: "
            f"choose groups by the shape of a NamedParameter, or compile without {option}"
        )
    if not same:
        raise UsageError(f"{probe.optimizer} {refused}")
