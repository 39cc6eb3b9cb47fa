"""The optimizers of a rank, one for every unit that it owns, made by the run's recipe; and gradient clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from logging import Logger
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpirun.data.values import digest_of
from mpirun.engine.grad_buffers import GradBuffer
from mpirun.engine.recipe import (
    NO_OPTIONS,
    NamedParameter,
    Recipe,
    SteppedOptimizer,
    check_steps_pieces,
    class_name,
    is_plain,
)
from mpirun.engine.same_start import Values
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import Unit, pieces
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import ShardedDim
from schedgen.util.errors import UsageError, clip

# Torch's own attributes: those that a checkpoint does not need, and those that are examined separately.
OWN = (
    "_opt_called", "_step_count", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured",
    "defaults", "param_groups", "state",
)  # fmt: skip
_requires_grad = attrgetter("requires_grad")


class Optimizer:
    """One torch optimizer for every unit that a rank owns: a stage, or a part of its weights."""

    def __init__(self, recipe: Recipe, model: Model, stages: Mapping[int, LocalStage], seed: int = 0) -> None:
        """`stages`: those of which the rank owns all weights or some parts. UsageError if the recipe fails.

        `seed`: of the run.
        """
        self.recipe, self.model, self.stages = recipe, model, stages
        # Parameters, or pieces of them, that only the optimizers hold: a STEP points them to a version's weights.
        # `data` hides the STEP from autograd, because graphs of other versions may be alive.
        self.parameters = {
            (index, part): stage.new_parameters(part) for index, stage in stages.items() for part in stage.owned
        }
        self.by_unit: dict[Unit, SteppedOptimizer] = {}
        # By name in the model: a parameter of a module, and the weights that its `data` is, except within a step.
        self.views: list[tuple[str, nn.Parameter, Tensor]] = [
            (model.entry_name(index, name), parameter, view)
            for index, stage in stages.items()
            if not stage.owns_separate_parts
            for name, parameter, view in zip(stage.names, stage.parameters, stage.views(stage.weights), strict=True)
        ]
        tried: set[str] = set()
        for unit, parameters in self.parameters.items():
            named = _named(model, stages[unit[0]], unit[1], parameters)
            for entry, dim in zip(named, _divided_along(model, stages[unit[0]], unit[1], len(named)), strict=True):
                if not recipe.name and not entry.whole:
                    check_steps_pieces(recipe, entry, dim, tried)
            if parameters:
                self.by_unit[unit] = recipe.make(named, seed, unit[1])
        reached = [
            (model.entry_name(index, name), x)
            for index, stage in stages.items()
            for name, x in stage.module.named_parameters()
        ]
        self.reached_names, self.reached = [name for name, _ in reached], [parameter for _, parameter in reached]
        self.trained = list(map(_requires_grad, self.reached))
        self.unsaved = {unit: _unsaved(made) for unit, made in self.by_unit.items()}  # hashes when just made
        # The stage, or version of it, that a unit's parameters point to now; the views of its weights and gradients.
        self.points_to: dict[Unit, tuple[LocalStage, list[Tensor], list[Tensor]]] = {}
        self.accumulated: dict[Unit, list[Tensor]] = {}  # gradients, summed over the passes of this step so far

    def description(self) -> tuple[str, dict[str, Any], list[dict[str, Any]]] | None:
        """The name of the optimizer, its settings, and the options that its groups have; None if this rank has none.

        As checkpoints record them; without a learning rate that differs from step to step.
        """
        if not self.by_unit:
            return None
        scheduled = "lr" if self.recipe.rate or self.recipe.scheduler else ""
        options = [of_group for made in self.by_unit.values() for of_group in made.options]
        groups = [{key: value for key, value in of_group.items() if key != scheduled} for of_group in options]
        optimizer = next(iter(self.by_unit.values())).optimizer
        left_out = (*NO_OPTIONS, scheduled)
        plain = {key: x for key, x in optimizer.defaults.items() if is_plain(x) and key not in left_out}
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
        name, distinct = self.recipe.name or class_name(type(optimizer)), {repr(group): group for group in groups}
        return name, {**settings, **self.recipe.settings}, list(distinct.values())

    def digests(self) -> dict[Values, str]:
        """What must be the same on all ranks that own a unit: the class of its optimizer, and the groups' options."""
        found = {}
        for (index, part), made in self.by_unit.items():
            what = "optimizer" if part < 0 else f"optimizer of part {part}"
            values = Values(self.model.model_stage(index), self.model.shard_of(index).index, what)
            found[values] = repr((class_name(type(made.optimizer)), made.options))
        return found

    def replaced_rates(self) -> list[float]:
        """The rates of groups, as the factory made them, that the recipe's rate replaces; empty if it has none."""
        options = [of_group for made in self.by_unit.values() for of_group in made.options]
        rates = {of_group.get("lr") for of_group in options} if self.recipe.rate is not None else ()
        return [rate for rate in rates if isinstance(rate, float | int)]

    def accumulate(self, gradients: Mapping[Unit, GradBuffer], first: bool, last: bool) -> None:
        """Add a pass's gradients to those of earlier passes; in the last pass the sums replace the buffers' totals."""
        for unit, gradient in gradients.items():
            totals = gradient.numbers[0]
            if unit not in self.accumulated:
                self.accumulated[unit] = [torch.empty_like(total) for total in totals]
            for before, total in zip(self.accumulated[unit], totals, strict=True):
                if first:
                    before.copy_(total)
                else:
                    torch.add(before, total, out=total if last else before)

    def state(self, unit: Unit) -> list[dict[str, Any]]:
        """The optimizer's state for each parameter of a unit, or piece of one, by torch's names (exp_avg, ...)."""
        if unit not in self.by_unit:
            return []
        by_parameter = self.by_unit[unit].optimizer.state
        return [
            {key: value for key, value in by_parameter.get(parameter, {}).items() if value is not None}
            for parameter in self.parameters[unit]
        ]

    def check_saved(self) -> None:
        """UsageError if an optimizer keeps state that checkpoints lack: all but tensors and numbers by parameter."""
        for unit, made in self.by_unit.items():
            changed = [name for name, value in _unsaved(made).items() if value != self.unsaved[unit].get(name)]
            if changed:
                kind, what = type(made.optimizer).__name__, clip(", ".join(changed))
                raise UsageError(f"the optimizer {kind} has changed its {what}, which checkpoints do not have")
            self._check_state(unit)

    def _check_state(self, unit: Unit) -> None:
        """UsageError if a state value is neither tensor nor number or, for a piece, is a tensor of another shape.

        Also if its name is not one that checkpoints have.
        """
        named = _named(self.model, self.stages[unit[0]], unit[1], self.parameters[unit])
        for (entry, parameter, _, whole), state in zip(named, self.state(unit), strict=True):
            for key, value in state.items():
                if not isinstance(key, str) or not key or "." in key or "@" in key:
                    what = f"the optimizer keeps state under {key!r}, which checkpoints cannot name"
                    raise UsageError(f"{what}: take a string without . and @")
                if not isinstance(value, Tensor | bool | int | float):
                    kind = type(value).__name__
                    raise UsageError(f"the optimizer keeps {key}, a {kind}: checkpoints have tensors and numbers")
                shape, own = tuple(value.shape) if isinstance(value, Tensor) else (), tuple(parameter.shape)
                if shape and shape != own and not whole:
                    raise UsageError(
                        f"the optimizer keeps {key}, of shape {shape}, for a part of {entry}, of shape {own}: "
                        "for such a part checkpoints have only numbers and tensors of its shape"
                    )

    def restore(self, unit: Unit, state: Sequence[dict[str, Any]]) -> None:
        """Set the state of a unit to what `state` returned."""
        if unit not in self.by_unit:
            return
        optimizer = self.by_unit[unit].optimizer
        by_parameter = {id(parameter): values for parameter, values in zip(self.parameters[unit], state, strict=True)}
        in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        by_index = {index: by_parameter[id(parameter)] for index, parameter in enumerate(in_groups)}
        by_index = {index: values for index, values in by_index.items() if values}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": by_index})
        for index, values in by_index.items():
            loaded = optimizer.state[in_groups[index]]
            for key, cast in loaded.items():  # torch casts all but the step to the parameter's type
                value = values.get(key)
                if key != "step" and isinstance(value, Tensor) and isinstance(cast, Tensor):
                    loaded[key] = value.to(cast.device)

    def take_assigned(self) -> None:
        """Copy what a script has assigned to `data` of its parameters into the weights, which `data` is from now on."""
        for parameter, view, value in self._assigned():
            view.copy_(value)
            parameter.data = view
        self._copy_to_twins()

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Inside, the weights are what a script has assigned to `data` of its parameters.

        It may have kept the `data` before, to assign them again: these are the weights, so they get their values back.
        """
        found = self._assigned()
        before = [view.clone() for _, view, _ in found]
        try:
            for _, view, value in found:
                view.copy_(value)
            self._copy_to_twins()
            yield
        finally:
            for (_, view, _), value in zip(found, before, strict=True):
                view.copy_(value)

    def _copy_to_twins(self) -> None:
        """Copy parameters that two stages have to the weights of the second: a script writes to those of the first."""
        for stage in self.stages.values():
            for view, parameter in stage.twins:
                view.copy_(parameter.data)

    def _assigned(self) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
        """The parameters whose `data` a script has assigned, their weights, and copies of `data`.

        UsageError if weights and `data` are not alike. `data` may be the memory of weights, too: two parameters may
        have exchanged theirs.
        """
        found = [entry for entry in self.views if not entry[1].is_set_to(entry[2])]
        for name, *tensors in found:
            of_script, own = (f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" for x in tensors)
            if of_script != own:
                raise UsageError(f"what was assigned to .data of {name} is {of_script}, but the parameter was {own}")
        return [(parameter, view, parameter.data.clone()) for _, parameter, view in found]

    def changed_flag(self) -> str:
        """A sentence on a parameter whose requires_grad the script has changed; empty: there is none."""
        now = list(map(_requires_grad, self.reached))
        if now == self.trained:
            return ""
        names = zip(self.reached_names, now, self.trained, strict=True)
        name, flag = next((name, flag) for name, flag, before in names if flag is not before)
        return (
            f"requires_grad of {name} has become {flag}, but a run trains what it has trained from its first step on: "
            "give it back before the next step, or freeze another module that has loaded the weights of state_dict(); "
            "to train it otherwise, save before, and resume with a new Engine; a scheduler may set a group's rate to 0"
        )

    def rate(self, step: int) -> float:
        """The learning rate of `step` on this rank: that of its first unit's first parameter group."""
        first = next(iter(self.by_unit.values()))
        first.set_rate(step)
        return first.rate

    def step(
        self,
        unit: Unit,
        gradient: GradBuffer,
        step: int,
        norm: float,
        version: LocalStage | None = None,
        update: int = 0,
    ) -> None:
        """Step the weights of a unit, after clipping its gradient by the norm of the whole gradient.

        `version`: the stage with the version of its weights to step; None: the weights at the start of a pass.
        `update`: the number of this update within the step.
        """
        if unit not in self.by_unit:
            return
        if self.recipe.clip is not None:
            for total in gradient.numbers[0]:
                total.mul_(clip_factor(norm, self.recipe.clip))
        index, part = unit
        stage = self.stages[index] if version is None else version
        made, parameters = self.by_unit[unit], self.parameters[unit]
        if unit not in self.points_to or self.points_to[unit][0] is not stage:
            weights = stage.weights if part < 0 else stage.owned[part]
            self.points_to[unit] = stage, stage.views_of_part(part, weights), stage.views_of_part(part, gradient.total)
            for parameter, view in zip(parameters, self.points_to[unit][1], strict=True):
                parameter.data = view
        _, views, grads = self.points_to[unit]
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.grad is not grad:  # an optimizer or a hook may assign to `grad` and `data`
                parameter.grad = grad
        made.step(step, stage.device.seed, update)
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.data_ptr() != view.data_ptr():  # messages and jobs read the weights from the view
                view.copy_(parameter.data)
                parameter.data = view


def _named(model: Model, stage: LocalStage, part: int, parameters: Sequence[nn.Parameter]) -> list[NamedParameter]:
    """A unit's parameters, or pieces of them, as a factory is given them."""
    names = [model.entry_name(stage.index, name) for name in stage.names]
    dims, shard = _divided_along(model, stage, -1, len(names)), model.shard_of(stage.index)
    shapes = [
        place.size if dim is None else torch.Size(dim.full_shape(place.size, shard))
        for place, dim in zip(stage.layout, dims, strict=True)
    ]
    if part < 0:
        whole = [dim is None for dim in dims]
        return [NamedParameter(*entry) for entry in zip(names, parameters, shapes, whole, strict=True)]
    numbers = [piece.parameter for piece in pieces(stage.layout, stage.part_slices[part])]
    return [
        NamedParameter(names[number], parameter, shapes[number], False)
        for number, parameter in zip(numbers, parameters, strict=True)
    ]


def _divided_along(model: Model, stage: LocalStage, part: int, count: int) -> list[ShardedDim | None]:
    """For each of a unit's `count` parameters, how tensor shards divide it; None: they do not, or it is a piece."""
    if part >= 0 or model.shard_of(stage.index).count == 1:
        return [None] * count
    return [stage.shape.sharded_dims.get(name) for name in stage.names]


def _unsaved(made: SteppedOptimizer) -> dict[str, str | None]:
    """By name, a hash of what an optimizer keeps outside of its state by parameter."""
    optimizer, groups = made.optimizer, made.optimizer.param_groups
    values = {name: value for name, value in vars(optimizer).items() if name not in OWN}
    for number, group in enumerate(groups):
        values |= {f"{name} of group {number}": value for name, value in group.items() if name not in made.set_names}
    parameters = {id(parameter) for group in groups for parameter in group["params"]}
    found = {name: _hash(value, parameters) for name, value in values.items()}
    for key in optimizer.state:
        if id(key) not in parameters:
            found[f"state of {key if isinstance(key, str) else type(key).__name__}"] = "is not of a parameter"
    return found


def _hash(value: Any, parameters: Collection[int]) -> str | None:
    """A hash of the numbers, strings and tensors in a value, without the parameters; None: there are none."""
    leaves = [leaf for leaf in _leaves(value) if id(leaf) not in parameters]
    return digest_of(leaves) if leaves else None


def _leaves(value: Any, of_objects: bool = True) -> Iterator[Any]:
    """The numbers, strings, tensors and arrays in a value, and in the attributes of its objects if `of_objects`."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) or is_plain(leaf):
            yield leaf
        elif isinstance(leaf, np.ndarray | np.generic):
            yield leaf.tolist()
        elif isinstance(leaf, torch.optim.Optimizer):  # an inner one, which this one steps
            yield from _leaves(leaf.state)
        elif isinstance(leaf, Mapping | Set):  # of types that are no pytrees
            yield from _leaves(list(leaf.values() if isinstance(leaf, Mapping) else leaf), of_objects)
        elif of_objects and not callable(leaf) and not isinstance(leaf, ModuleType | Logger):
            yield from _leaves(getattr(leaf, "__dict__", {}), False)


def clip_factor(norm: float, limit: float) -> float:
    """The factor that a gradient of this norm is multiplied by, as in torch.nn.utils.clip_grad_norm_."""
    return min(limit / (norm + 1e-6), 1.0)
