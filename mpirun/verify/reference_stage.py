"""A stage of the model in the one process that a run is compared with, and the optimizer of such stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpirun.engine.core.stage import LocalStage
from mpirun.engine.recipe import NamedParameter, SteppedOptimizer
from mpirun.engine.setup import Setup
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from mpirun.model.module_tensors import buffer_copies, given_modules, own_tensors
from mpirun.model.rng import layers_of
from mpirun.model.stage_copies import stage_apart, stage_with
from mpirun.verify.record import Parameters, on_host

Start = Mapping[int, Mapping[str, Tensor]]  # by stage of the model, the values that a run's first step begins with


def first_values(model: Model, seed: int) -> Start:
    """Copies of the values of the modules that a script gave, by stage and name: a run changes these modules."""
    start: dict[int, Mapping[str, Tensor]] = {}
    for stage, entry in enumerate(model.stages):
        if given_modules(entry):
            with stage_apart(model, stage, seed) as (module, _):
                start[stage] = own_tensors(module)
    return start


def gradient_of(leaf: Tensor) -> Tensor:
    """A leaf's gradient; zeros if there is none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class ReferenceStage:
    """A stage's module with all its weights, and its trained parameters by name."""

    def __init__(self, setup: Setup, index: int, earlier: Iterable[ReferenceStage], start: Start) -> None:
        """`setup`: the run's, or that of the model without slices; `earlier`: stages that were built before."""
        self.index, shape, model = index, setup.shapes[index], setup.model
        if (values := start.get(model.model_stage(index))) is None:
            self.module = build_stage(model, index, setup.seed)
        else:
            self.module = stage_with(model, index, values)
        before = [stage.local for stage in earlier]
        self.local: LocalStage = LocalStage(self.module, index, shape, setup.device, owned_shards=(-1,), earlier=before)
        # All layers: trials of other shapes may have found more that draw than that of the first.
        entry, self.layer_rng = model.stages[index], self.local.layer_rng
        layers = layers_of(self.module, list(entry) if isinstance(entry, Mapping) else [])
        self.layer_rng.add(self.module, shape.model_stage, layers)
        self.parameters = dict(zip(self.local.names, self.local.parameters, strict=True))

    def __call__(self, *arguments: Any) -> Any:
        """The forward."""
        self.local.bind()
        return self.module(*arguments)

    def take_gradients(self) -> dict[str, Tensor]:
        """Remove and return the parameters' gradients; zeros where there is none."""
        gradients = {name: gradient_of(parameter) for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients


def changed_buffers(stages: Iterable[ReferenceStage]) -> Parameters:
    """Copies, in host memory, of the buffers of stages whose forwards change some."""
    changing = [stage for stage in stages if stage.local.shape.overwrites_buffers]
    return on_host({(s.index, name): x for s in changing for name, x in buffer_copies(s.module).items()})


def optimizer_of(setup: Setup, stages: Sequence[ReferenceStage]) -> SteppedOptimizer | None:
    """One optimizer for all trained parameters of these stages; None: there are none."""
    named = [
        NamedParameter(setup.model.entry_name(stage.index, name), parameter, parameter.shape, True)
        for stage in stages
        for name, parameter in stage.parameters.items()
    ]
    return setup.recipe.make(named, setup.seed) if named else None
