"""Modules on the meta device, which have no values: a rank makes those of the stages that it builds."""

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

Init = Callable[[nn.Module], Any]


def is_deferred(module: nn.Module) -> bool:
    """Whether it has no values."""
    return any(one.is_meta for one in (*module.parameters(), *module.buffers()))


class Values(NamedTuple):
    """A module without values, and what gives a submodule those of its own parameters and buffers, in place."""

    module: nn.Module
    init: Init | None  # None: its reset_parameters


def values_of(module: nn.Module, init: Init | None) -> Values | None:
    """None: the module has its values."""
    if init is not None and not callable(init):
        raise UsageError(f"init should be a function of a module, not {type(init).__name__}")
    if is_deferred(module):
        return Values(module, init)
    if init is not None:
        raise UsageError("init gives values to a module on the meta device, but this one has values")
    return None


class Deferred:
    """Builds a stage, or a layer of one: each submodule of the source seeded by its name, whatever the cut."""

    seeded = "module"  # all stages alike

    def __init__(self, stage: nn.Module, source: Values) -> None:
        self.stage, self.source = stage, source

    def __call__(self) -> nn.Module:
        seed = torch.initial_seed()
        empty = {
            name: one for name, one in (*self.stage.named_parameters(), *self.stage.named_buffers()) if one.is_meta
        }
        submodules = dict.fromkeys(name.rpartition(".")[0] for name in empty)
        made = {name: self._made(name, derived_seed(seed, name) % 2**63) for name in submodules}
        values: dict[int, Tensor] = {}
        for name, one in empty.items():
            submodule, _, own = name.rpartition(".")
            value = getattr(made[submodule], own)
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (one.shape, one.dtype) or _unset(value):
                by = "init" if self.source.init else "reset_parameters"
                raise UsageError(f"{name} is on the meta device, and {by} gives it no values")
            values[id(one)] = value
        return copy.deepcopy(self.stage, values)

    def _made(self, name: str, seed: int) -> nn.Module:
        """A submodule of which only what is its own has values."""
        module = copy.copy(self.source.module.get_submodule(name))
        module._parameters = {
            own: one if one is None else nn.Parameter(_empty(one), one.requires_grad)
            for own, one in module._parameters.items()
        }
        module._buffers = {own: one if one is None else _empty(one) for own, one in module._buffers.items()}
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


def _empty(one: Tensor) -> Tensor:
    """Memory for it on the CPU, filled with what nothing is set to."""
    found = torch.empty(one.shape, dtype=one.dtype, device="cpu")
    nothing = _nothing(one.dtype)
    return found if nothing is None else found.fill_(nothing)


def _nothing(dtype: torch.dtype) -> float | None:
    """None: any value may be meant."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).max if dtype in (torch.int32, torch.int64) else None


def _unset(value: Tensor) -> bool:
    """Whether nothing was written to it; unknown of booleans and bytes, and of shapes alone."""
    nothing = _nothing(value.dtype)
    if isinstance(value, FakeTensor) or nothing is None or not value.numel():
        return False
    return bool((value.isnan() if math.isnan(nothing) else value == nothing).all())
