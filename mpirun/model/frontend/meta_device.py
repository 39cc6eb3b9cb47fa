"""Modules on the meta device, which have no values: a rank gives values to the stages that it builds, and no others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpirun.model.rng import derived_seed
from schedgen.util.errors import UsageError

Init = Callable[[nn.Module], Any]  # gives a submodule the values of its own parameters and buffers, in place


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class MetaModule(NamedTuple):
    """A module without values, and what gives them to its submodules."""

    module: nn.Module
    init: Init | None  # None: the submodule's reset_parameters


def meta_module(module: nn.Module, init: Init | None) -> MetaModule | None:
    """None where the module has its values; UsageError where there is an `init` all the same."""
    if init is not None and not callable(init):
        raise UsageError(f"init should be a function of a module, not {type(init).__name__}")
    if is_on_meta(module):
        return MetaModule(module, init)
    if init is not None:
        raise UsageError("init gives values to a module on the meta device, but this one has values")
    return None


class MetaBuilder:
    """Builds a stage, or a layer of one: each submodule's values are seeded by its name, whatever the cut."""

    seeded = "module"  # by this and the run's seed: all stages alike

    def __init__(self, stage: nn.Module, source: MetaModule) -> None:
        """`stage` is made of tensors of `source`, under the same names."""
        self.stage, self.source = stage, source

    def __call__(self) -> nn.Module:
        """A copy of the stage with values on the CPU; UsageError where nothing gives values to one of its tensors."""
        seed = torch.initial_seed()
        tensors = {**dict(self.stage.named_parameters()), **dict(self.stage.named_buffers())}
        empty = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
        owners = dict.fromkeys(name.rpartition(".")[0] for name in empty)
        filled = {name: self._filled(name, derived_seed(seed, name)) for name in owners}
        values: dict[int, Tensor] = {}
        for name, tensor in empty.items():
            owner, _, attribute = name.rpartition(".")
            value = getattr(filled[owner], attribute)
            fits = isinstance(value, Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
            if not fits or _is_unset(value):
                by = "init" if self.source.init else "reset_parameters"
                raise UsageError(f"{name} is on the meta device, and {by} gives it no values")
            values[id(tensor)] = value
        return copy.deepcopy(self.stage, values)

    def _filled(self, name: str, seed: int) -> nn.Module:
        """A copy of the source's submodule whose own parameters and buffers, but not its children's, have values."""
        module = copy.copy(self.source.module.get_submodule(name))
        module._parameters = {
            own: parameter if parameter is None else nn.Parameter(_unset(parameter), parameter.requires_grad)
            for own, parameter in module._parameters.items()
        }
        module._buffers = {own: buffer if buffer is None else _unset(buffer) for own, buffer in module._buffers.items()}
        init = self.source.init or getattr(type(module), "reset_parameters", None)
        if init is None:
            raise UsageError(
                f"{name or 'the module'}, {type(module).__name__}: is on the meta device and has no reset_parameters: "
                "init should give it values"
            )
        torch.manual_seed(seed)
        with torch.no_grad():
            init(module)
        return module


def _unset(tensor: Tensor) -> Tensor:
    """Memory for it on the CPU, filled with the value that stands for none."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    filler = _filler(tensor.dtype)
    return memory if filler is None else memory.fill_(filler)


def _filler(dtype: torch.dtype) -> float | None:
    """A value that no init gives; None where any value may be meant: booleans and bytes."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).max if dtype in (torch.int32, torch.int64) else None


def _is_unset(value: Tensor) -> bool:
    """Whether nothing was written to it, as far as that can be seen: not of fake tensors."""
    filler = _filler(value.dtype)
    if isinstance(value, FakeTensor) or filler is None or not value.numel():
        return False
    return bool((value.isnan() if math.isnan(filler) else value == filler).all())
