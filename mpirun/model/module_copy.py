"""Stages as copies of an existing module.

A module on the meta device has no values: a rank gives values to the stages that it builds, and no others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError

# Gives a submodule, whose name may be the second argument, the values of its own parameters and buffers, in place.
Init = Callable[..., Any]


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class MetaModule(NamedTuple):
    """A module without values, and what gives them to its submodules."""

    module: nn.Module
    init: Init | None  # None: the submodule's reset_parameters
    prefix: str = ""  # what names in the whole model have before those in it


def meta_module(module: nn.Module, init: Init | None) -> MetaModule | None:
    """The `MetaModule` of a module; None if the module has values, and then UsageError if there is an `init`."""
    if init is not None and not callable(init):
        raise UsageError(f"init should be a function of a module, not {type(init).__name__}")
    if is_on_meta(module):
        return MetaModule(module, init)
    if init is not None:
        raise UsageError("init gives values to a module on the meta device, but this one has values")
    return None


class ModuleCopy:
    """Builds a stage, or a layer of one, as a copy of an existing module, which stays as it is.

    In a module on the meta device each submodule's values are seeded by its name, for every cut.
    """

    seeded = "module"  # by this word and the run's seed: the same for all stages

    def __init__(self, module: nn.Module, source: MetaModule | None = None) -> None:
        """`source`: if `module` is on the meta device, the module whose tensors it has, under the same names."""
        self.module, self.source = module, source

    def __call__(self) -> nn.Module:
        """A copy with values on the CPU; UsageError if nothing gives values to one of its tensors."""
        return self.build({}, lambda name, tensor: True)

    def build(self, values: Mapping[str, Tensor], needs_values: Callable[[str, Tensor], bool]) -> nn.Module:
        """The copy with these values by name; other tensors that need no values have memory only."""
        seed = torch.initial_seed()
        tensors = own_tensors(self.module)
        copies: dict[int, Tensor] = {}
        unset: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name in values:
                copies[id(tensor)] = like(tensor, values[name])
            elif not needs_values(name, tensor):
                copies[id(tensor)] = like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            elif tensor.is_meta:
                unset[name] = tensor
        owners = dict.fromkeys(name.rpartition(".")[0] for name in unset)
        filled = {name: self._filled(name, derived_seed(seed, name)) for name in owners}
        for name, tensor in unset.items():
            owner, _, attribute = name.rpartition(".")
            value = getattr(filled[owner], attribute)
            fits = isinstance(value, Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
            if fits and _is_byte(value.dtype):  # any value may be meant: inits of other memory should agree
                fits = torch.equal(value, getattr(self._filled(owner, derived_seed(seed, owner), 1), attribute))
            if not fits or _is_unset(value):
                by = "init" if self.source is not None and self.source.init else "reset_parameters"
                raise UsageError(f"{name} is on the meta device, and {by} gives it no values")
            copies[id(tensor)] = value
        return copy.deepcopy(self.module, copies)

    def _filled(self, name: str, seed: int, byte: int = 0) -> nn.Module:
        """A copy of the source's submodule whose own parameters and buffers, but not its children's, have values.

        `byte`: what booleans and bytes are filled with before.
        """
        source = self.source or MetaModule(self.module, None)
        module = copy.copy(source.module.get_submodule(name))
        module._parameters = {
            own: parameter if parameter is None else nn.Parameter(_unset(parameter, byte), parameter.requires_grad)
            for own, parameter in module._parameters.items()
        }
        module._buffers = {
            own: buffer if buffer is None else _unset(buffer, byte) for own, buffer in module._buffers.items()
        }
        own_init = getattr(type(module), "reset_parameters", None)
        init = source.init or own_init or getattr(source.module, "_init_weights", None)  # as in transformers
        if init is None:
            raise UsageError(
                f"{name or 'the module'}, {type(module).__name__}: is on the meta device and has no reset_parameters: "
                "init should give it values"
            )
        seed_generators(seed)
        with torch.no_grad():
            if _takes_name(init):
                init(module, f"{source.prefix}{name}".removesuffix("."))
            else:
                init(module)
        return module


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def compiled_in_place(module: nn.Module) -> list[str]:
    """The names of submodules on which `Module.compile` was called; "" is the module itself."""
    return [name for name, part in module.named_modules() if part._compiled_call_impl is not None]


def parameter_aliases(module: nn.Module) -> dict[str, list[str]]:
    """By first name of a parameter that has several names in a module, the other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def shared_parameters(stages: Sequence[object]) -> list[list[tuple[int, str]]]:
    """The trained parameters with more than one name in stages that are modules, each as a tie of (stage, name)."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(stages):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    places.setdefault(id(parameter), []).append((stage, name))
    return [tie for tie in places.values() if len(tie) > 1]


def shared_buffers(stages: Sequence[object]) -> list[list[tuple[int, str]]]:
    """The buffers that the modules of several stages, or of layers of one, share: each as a list of (stage, name)."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, entry in enumerate(stages):
        for prefix, layer in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            module = layer.module if isinstance(layer, ModuleCopy) else layer
            if isinstance(module, nn.Module):
                for name, buffer in module.named_buffers(prefix):
                    places.setdefault(id(buffer), []).append((stage, name))
    return [shared for shared in places.values() if len(shared) > 1]


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """The value; as a parameter if `tensor` is one, frozen or trained like that."""
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _takes_name(init: Init) -> bool:
    """Whether an `init` has a second argument without a default: the submodule's name."""
    try:
        parameters = inspect.signature(init).parameters.values()
    except (ValueError, TypeError):  # not written in Python
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) > 1


def _is_byte(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and not dtype.is_floating_point


def _unset(tensor: Tensor, byte: int) -> Tensor:
    """Memory for a tensor on the CPU, filled with a value that means unset; booleans and bytes with `byte`."""
    filler = byte if _is_byte(tensor.dtype) else _filler(tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").fill_(filler)


def _filler(dtype: torch.dtype) -> float:
    """A value that no init gives."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_unset(value: Tensor) -> bool:
    """Whether nothing was written to a tensor, as far as that can be seen."""
    if _is_byte(value.dtype) or not value.numel():
        return False
    inexact = value.is_floating_point() or value.is_complex()
    return bool((value.isnan() if inexact else value == _filler(value.dtype)).all())
