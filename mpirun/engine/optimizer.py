"""The optimizers of a rank, one for every unit that it owns, made by the run's recipe.

Their state may live in the memory of the host. Between RELOAD and FREE it has copies on the device. What a STEP adds
to it, as the first one adds everything, goes to the host with the rest. A number, such as the count of steps, stays
where the optimizer puts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpirun.comm.device import Device
from mpirun.engine.core.grad_buffers import GradBuffer
from mpirun.engine.core.offload import Copies
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.grad_norm import clip_factor
from mpirun.engine.recipe import NamedParameter, Recipe, SteppedOptimizer
from mpirun.model.contract import Model
from mpirun.model.meta_values import like_parameter
from mpirun.model.stage_shape import Unit, pieces
from schedgen.util.errors import UsageError, clip


class Optimizer:
    """The torch optimizers of every unit that a rank owns: a stage, or a shard of its weights."""

    def __init__(
        self, recipe: Recipe, model: Model, stages: Mapping[int, LocalStage], seed: int = 0, on_host: bool = False
    ) -> None:
        """`stages`: those of which the rank owns all weights or some shards. UsageError if the recipe fails.

        seed     of the run
        on_host  whether the state lives in the memory of the host
        """
        self.recipe, self.stages = recipe, stages
        # Parameters, or pieces of them, that only the optimizers hold: a STEP points them to a version's weights.
        # `data` hides the STEP from autograd, because graphs of other versions may be alive.
        self.parameters = {
            (index, shard): _new_parameters(stage, shard) for index, stage in stages.items() for shard in stage.owned
        }
        self.by_unit: dict[Unit, SteppedOptimizer] = {}
        self.left_out: set[str] = set()  # the names of parameters that no optimizer has
        # Parameters of modules, and the weights that their `data` are, except within a step.
        self.views: list[tuple[nn.Parameter, Tensor]] = [
            pair
            for stage in stages.values()
            if not stage.owns_separate_shards
            for pair in zip(stage.parameters, stage.views(stage.weights), strict=True)
        ]
        for unit, parameters in self.parameters.items():
            if parameters:
                stage = stages[unit[0]]
                made = recipe.make(_named(model, stage, unit[1], parameters), seed, unit[1])
                self.left_out |= made.left_out
                stage.outside_norm |= {n for n in stage.names if model.entry_name(stage.index, n) in made.left_out}
                if made.optimizers:
                    self.by_unit[unit] = made
        self.on_host = {
            unit: StateOnHost(stages[unit[0]].device, self.by_unit[unit].optimizers if unit in self.by_unit else [])
            for unit in self.parameters
            if on_host
        }
        # The stage, or version of it, that a unit's parameters point to now; the views of its weights and gradients.
        self.points_to: dict[Unit, tuple[LocalStage, list[Tensor], list[Tensor]]] = {}

    @property
    def names(self) -> set[str]:
        """The names of the torch optimizers' classes, as checkpoints record them."""
        kinds = {type(each) for made in self.by_unit.values() for each in made.optimizers}
        return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}

    def state(self, unit: Unit) -> list[dict[str, Any]]:
        """The optimizer's state for each parameter of a unit, or piece of one, by torch's names (exp_avg, ...)."""
        if unit not in self.by_unit:
            return []
        if unit in self.on_host:
            self.stages[unit[0]].device.finish()
        by_parameter = {x: kept for each in self.by_unit[unit].optimizers for x, kept in each.state.items()}
        return [
            {key: value for key, value in by_parameter.get(parameter, {}).items() if value is not None}
            for parameter in self.parameters[unit]
        ]

    def check_saved(self) -> None:
        """UsageError if an optimizer's state_dict has something that checkpoints lack."""
        for made in self.by_unit.values():
            if names := made.kept_elsewhere():
                kinds = " and ".join(type(each).__name__ for each in made.optimizers)
                what = f"the optimizer {kinds} keeps {clip(', '.join(names))}"
                raise UsageError(f"{what}: checkpoints have only what it keeps in `state` by parameter")

    def restore(self, unit: Unit, state: Sequence[dict[str, Any]]) -> None:
        """Set the state of a unit to what `state` returned."""
        if unit not in self.by_unit:
            return
        by_parameter = {id(parameter): values for parameter, values in zip(self.parameters[unit], state, strict=True)}
        for optimizer in self.by_unit[unit].optimizers:
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
        if unit in self.on_host:
            self.on_host[unit].offload()
            self.on_host[unit].free()

    def take_assigned(self) -> None:
        """Copy what another Engine has assigned to `data` of a module's parameters into the weights.

        And what a script has written to parameters that two stages have, which are those of the first, to the second.
        """
        for parameter, view in self.views:
            if not parameter.is_set_to(view):
                view.copy_(parameter.data)
                parameter.data = view
        for stage in self.stages.values():
            for view, parameter in stage.twins:
                view.copy_(parameter.data)

    def rate(self, step: int) -> float:
        """The learning rate of `step` on this rank: that of its first unit's first parameter group."""
        if not self.by_unit:
            return 0.0
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
        index, shard = unit
        stage = self.stages[index] if version is None else version
        made, parameters = self.by_unit[unit], self.parameters[unit]
        if unit not in self.points_to or self.points_to[unit][0] is not stage:
            weights = stage.weights if shard < 0 else stage.owned[shard]
            self.points_to[unit] = (
                stage,
                stage.views_of_shard(shard, weights),
                stage.views_of_shard(shard, gradient.total),
            )
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


def _new_parameters(stage: LocalStage, shard: int) -> list[nn.Parameter]:
    """The parameters in an owned shard, or pieces of them, as new ones with the attributes of the module's."""
    trained = [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
    of_shard = trained if shard < 0 else [trained[p.parameter] for p in pieces(stage.layout, stage.shard_spans[shard])]
    views = stage.views_of_shard(shard, stage.owned[shard])
    return [like_parameter(parameter, view.data) for parameter, view in zip(of_shard, views, strict=True)]


def _named(model: Model, stage: LocalStage, shard: int, parameters: Sequence[nn.Parameter]) -> list[NamedParameter]:
    names = [model.entry_name(stage.index, name) for name in stage.names]
    slice = model.slice_of(stage.index)
    dims = [stage.shape.sliced_dims.get(name) if slice.count > 1 else None for name in stage.names]
    shapes = [
        place.size if dim is None else torch.Size(dim.full_shape(place.size, slice))
        for place, dim in zip(stage.layout, dims, strict=True)
    ]
    if shard < 0:
        whole = [dim is None for dim in dims]
        return [NamedParameter(*entry) for entry in zip(names, parameters, shapes, whole, strict=True)]
    numbers = [piece.parameter for piece in pieces(stage.layout, stage.shard_spans[shard])]
    return [
        NamedParameter(names[number], parameter, shapes[number], False)
        for number, parameter in zip(numbers, parameters, strict=True)
    ]


class StateOnHost(Copies):
    """The state of the optimizers of a unit."""

    def __init__(self, device: Device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(device)
        self.optimizers = optimizers
        self.places: dict[tuple[Tensor, str], Tensor] = {}  # by parameter and name: the host's copy

    def _tensors(self) -> Iterator[tuple[dict[str, Any], tuple[Tensor, str], Tensor]]:
        """All tensors but numbers: the dictionary that has it, its parameter and name there, and itself."""
        for optimizer in self.optimizers:
            for parameter, kept in optimizer.state.items():
                for name, x in list(kept.items()):
                    if isinstance(x, Tensor) and x.dim():
                        yield kept, (parameter, name), x

    def reload(self) -> None:
        """Start copying it to new memory of the device."""
        copies = []
        for kept, (_, name), x in self._tensors():
            kept[name] = torch.empty_like(x, device=self.device.torch)
            copies.append((kept[name], x))
        with self.launched(out=False):
            for on_device, x in copies:
                on_device.copy_(x, non_blocking=True)

    def offload(self) -> None:
        """Start copying it to the host."""
        self.wait()
        with self.launched(out=True):
            for _, key, x in self._tensors():
                if key not in self.places:
                    self.places[key] = self.device.host(x.nbytes)[: x.nbytes].view(x.dtype).view(x.shape)
                self.places[key].copy_(x, non_blocking=True)

    def free(self) -> None:
        """End the copies on the device, for kernels launched from now on."""
        self.wait()
        for kept, key, _ in self._tensors():
            kept[key[1]] = self.places[key]
