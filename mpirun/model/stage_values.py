"""The values of a stage's parameters and buffers: from `Model.weights`, else from the module, else from its init."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpirun.model.contract import Model
from mpirun.model.meta_values import MetaModule, MetaStage, initial_values, like
from mpirun.model.module_tensors import own_tensors, replace_tensors
from mpirun.model.parallel_layers import Slice, SlicedDim, sliced_dims
from mpirun.model.weight_names import weight_names
from schedgen.util.errors import UsageError

NeedsValue = Callable[[str, Tensor], bool]  # takes a name in the stage, and its parameter or buffer


class StageValues:
    """Gives values to the layers of one stage."""

    def __init__(self, model: Model, stage: int, needs_value: NeedsValue, mapped: bool) -> None:
        """`mapped`: as for `build_stage`."""
        self.model, self.stage, self.needs_value, self.mapped = model, stage, needs_value, mapped
        self.loaded: set[str] = set()  # names of the values that `weights` gave

    def give(self, module: nn.Module, make: object, prefix: str) -> None:
        """Give a layer the values that `weights` has for it, and values to tensors on the meta device that need some.

        `make`: its entry in the model; `prefix`: what its names in the stage begin with.
        """
        values, seed, tensors = self._load(module, prefix), torch.initial_seed(), own_tensors(module)
        tied = {
            name for tie in self.model.tied if tie[0][0] != self.stage for place, name in tie if place == self.stage
        }
        tied -= {prefix + name for name in values}  # these get the value of the tie's first
        on_meta = {name: x for name, x in tensors.items() if x.is_meta and prefix + name not in tied}
        unset = {name: x for name, x in on_meta.items() if name not in values and self.needs_value(prefix + name, x)}
        if unset and not isinstance(make, nn.Module | MetaStage):
            raise UsageError(f"{next(iter(unset))} is on the meta device, and no weights give it values")
        source = make.source if isinstance(make, MetaStage) else MetaModule(module, None)
        values |= initial_values(source, unset, seed)
        for name, value in values.items():
            if name not in on_meta:
                tensors[name].data = value
        empty = {name: torch.empty_like(x, device="cpu") for name, x in on_meta.items() if name not in values}
        new = {id(x): like(x, (values | empty)[name]) for name, x in on_meta.items()}
        for part in (module, source.module):
            replace_tensors(part, new)
        for parameter in module.parameters():
            if parameter.requires_grad:  # as in the flat weights of a run
                parameter.data = parameter.data.contiguous()

    def _load(self, module: nn.Module, prefix: str) -> dict[str, Tensor]:
        if self.model.weights is None:
            return {}
        tensors = {name: x for name, x in own_tensors(module).items() if self.needs_value(f"{prefix}{name}", x)}
        names = {n: c for n, c in weight_names(self.model, self.stage, module, prefix).items() if n in tensors}
        weights = dict(self.model.weights([candidate for candidates in names.values() for candidate in candidates]))
        dims, values = sliced_dims(module), {}
        for name, candidates in names.items():
            present = [candidate for candidate in candidates if candidate in weights]
            if present:
                values[name] = self._fitted(present[0], weights[present[0]], tensors[name], dims.get(name))
                self.loaded.add(f"{prefix}{name}")
        return values

    def _fitted(self, name: str, value: Tensor, tensor: Tensor, dim: SlicedDim | None) -> Tensor:
        """A weight converted for a parameter or buffer: this slice's share, in the module's type."""
        slice = self.model.slice_of(self.stage)
        expected = whole_shape(tensor, dim, slice)
        if tuple(value.shape) != expected:
            raise UsageError(f"weights: {name} has shape {tuple(value.shape)}, but {expected} in the model")
        if value.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise UsageError(f"weights: {name} is {value.dtype}, but {tensor.dtype} in the model")
        if dim is not None and slice.count > 1:
            value = dim.share(value, slice)
        copied = not (self.mapped and tensor.requires_grad)
        return value.to(tensor.dtype, copy=copied, memory_format=torch.contiguous_format)


def whole_shape(tensor: Tensor, dim: SlicedDim | None, slice: Slice) -> tuple[int, ...]:
    """The shape of a tensor in the weights; a tensor slice has a share of it along `dim`, or all of it if None."""
    return tuple(tensor.shape) if dim is None or slice.count == 1 else dim.full_shape(tensor.shape, slice)
