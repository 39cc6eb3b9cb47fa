"""A stage of the model in the one process that a run is compared with, and the optimizer of such stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mpirun.engine.recipe import NamedParameter, SteppedOptimizer
from mpirun.engine.setup import Setup
from mpirun.model.build_stage import build_stage
from mpirun.model.rng import LayerRng, layers_of
from mpirun.verify.microbatch import gradient_of


class ReferenceStage:
    """A stage's module with all its weights, and its trained parameters by name."""

    def __init__(self, setup: Setup, index: int) -> None:
        """`setup`: the run's, or that of the model without shards."""
        self.index, shape, entry = index, setup.shapes[index], setup.model.stages[index]
        self.module = build_stage(setup.model, index, setup.seed).to(setup.device.torch)
        # All layers: trials of other shapes may have found more that draw than that of the first.
        layers = layers_of(self.module, list(entry) if isinstance(entry, Mapping) else [])
        self.layer_rng = LayerRng(self.module, shape.model_stage, layers, setup.device.seed)
        self.parameters = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}

    def take_gradients(self) -> dict[str, Tensor]:
        """Remove and return the parameters' gradients; zeros where there is none."""
        gradients = {name: gradient_of(parameter) for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients


def optimizer_of(setup: Setup, stages: Sequence[ReferenceStage]) -> SteppedOptimizer | None:
    """One optimizer for all trained parameters of these stages; None: there are none."""
    named = [
        NamedParameter(setup.model.entry_name(stage.index, name), parameter, parameter.shape, True)
        for stage in stages
        for name, parameter in stage.parameters.items()
    ]
    return setup.recipe.make(named, setup.seed) if named else None
