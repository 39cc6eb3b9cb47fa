"""Stages as copies of an existing module.

A module on the meta device has no values: a rank gives values to the stages that it builds, and no others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError

# Sets the values of a submodule's own parameters and buffers in place; takes the submodule, and perhaps its name.
Init = Callable[..., Any]


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class MetaModule(NamedTuple):
    """A module on the meta device, and the function that gives values to its submodules."""

    module: nn.Module
    init: Init | None  # None: _init_weights of the model, or the submodule's reset_parameters
    prefix: str = ""  # of the module's names in the whole model


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

    seeded = "module"  # modules are seeded by this word and the run's seed: the same for all stages

    def __init__(self, module: nn.Module, source: MetaModule | None = None) -> None:
        """`source`: if `module` is on the meta device, the module that has its tensors, under the same names."""
        self.module, self.source = module, source

    def __call__(self) -> nn.Module:
        """A copy with values on the CPU; UsageError if nothing gives values to one of its tensors."""
        return self.build({}, lambda name, tensor: True)

    def build(self, values: Mapping[str, Tensor], needs_values: Callable[[str, Tensor], bool]) -> nn.Module:
        """A copy with these values, by name; other tensors that need no values get uninitialised memory."""
        for name, part in self.module.named_modules():
            hooks = [hook for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
            if any(not getattr(part, hook.name).is_leaf for hook in hooks):
                raise UsageError(
                    f"{name or 'the module'}, {type(part).__name__}: has torch.nn.utils.weight_norm, which cannot be "
                    "copied: use torch.nn.utils.parametrizations.weight_norm"
                )
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
            elif type(tensor) is nn.Parameter and vars(tensor):  # torch's deepcopy loses attributes
                copies[id(tensor)] = like_parameter(tensor, tensor.detach().clone())
        by_owner: dict[str, dict[str, Tensor]] = {}
        for name, tensor in unset.items():
            owner, _, attribute = name.rpartition(".")
            by_owner.setdefault(owner, {})[attribute] = tensor
        initialiser = _Initialiser(self.source or MetaModule(self.module, None))
        for owner, needed in by_owner.items():
            made = initialiser.values(owner, needed, derived_seed(seed, owner))
            copies |= {id(tensor): made[attribute] for attribute, tensor in needed.items()}
        return copy.deepcopy(self.module, copies)


class _Initialiser:
    """Initialises a module on the meta device: the parameters and buffers of one submodule at a time.

    A model's own `_init_weights`, as transformers' models have it, is called for the submodule and then for the modules
    around it, which may set its parameters. If values are still missing, all are called again after `reset_parameters`.
    """

    def __init__(self, source: MetaModule) -> None:
        """`source` is not changed."""
        self.source = source

    @cached_property
    def module(self) -> nn.Module:
        """A copy of the source, without values, for inits to change."""
        return _without_values(self.source.module, {})

    def values(self, owner: str, needed: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Values for the tensors `needed` of submodule `owner` itself, by name there; UsageError if one gets none."""
        module = self.module.get_submodule(owner)
        model_inits = self._model_inits(owner)
        reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
        if self.source.init:
            by, ways = "init gives it no values", [[self._call(self.source.init, owner)]]
        elif model_inits and reset:
            by = "neither _init_weights nor reset_parameters gives it values: init should"
            ways = [model_inits, [reset, *model_inits]]
        elif model_inits:
            by, ways = "_init_weights gives it no values: init should", [model_inits]
        elif reset:
            by, ways = "reset_parameters gives it no values: init should", [[reset]]
        else:
            raise UsageError(
                f"{owner or 'the module'}, {type(module).__name__}: is on the meta device and has no reset_parameters: "
                "init should give it values"
            )
        has_bytes = any(_is_byte(tensor.dtype) for tensor in needed.values())
        values: dict[str, Tensor] = {}
        for way in ways:
            made = self._made(module, way, seed, 0)
            again = self._made(module, way, seed, 1) if has_bytes else made
            values = {name: made[name] for name, meta in needed.items() if _is_given(meta, made[name], again[name])}
            if len(values) == len(needed) and not any(_unset_elements(value).any() for value in values.values()):
                break
        if missing := [name for name in needed if name not in values]:
            raise UsageError(f"{owner}.{missing[0]}".removeprefix(".") + f" is on the meta device, and {by}")
        return values

    def _model_inits(self, owner: str) -> list[Callable[[], Any]]:
        """Calls of the surrounding model's `_init_weights`: for a submodule, then for the modules around it.

        Where models are nested, each module gets the `_init_weights` of the innermost model.
        """
        calls: list[Callable[[], Any]] = []
        init, parts = None, owner.split(".") if owner else []
        for depth in range(len(parts) + 1):
            name = ".".join(parts[:depth])
            own = getattr(self.module.get_submodule(name), "_init_weights", None)
            init = own if own is not None and _required(own) in (1, 2) else init
            if init is not None:
                calls.insert(0, self._call(init, name))
        return calls

    def _call(self, init: Init, name: str) -> Callable[[], Any]:
        """A call of an init for a submodule."""
        module = self.module.get_submodule(name)
        whole = f"{self.source.prefix}{name}".removesuffix(".")
        return partial(init, module, whole) if _required(init) > 1 else partial(init, module)

    def _made(self, module: nn.Module, inits: Sequence[Callable[[], Any]], seed: int, byte: int) -> dict[str, Any]:
        """A submodule's own parameters and buffers, not its children's, as these inits set them.

        `byte`: the value that booleans and bytes have before.
        """
        before = module._parameters, module._buffers
        module._parameters = {
            own: parameter if parameter is None else like_parameter(parameter, _unset(parameter, byte))
            for own, parameter in module._parameters.items()
        }
        module._buffers = {
            own: buffer if buffer is None else _unset(buffer, byte) for own, buffer in module._buffers.items()
        }
        seed_generators(seed)
        try:
            with torch.no_grad():
                for init in inits:
                    init()
            return {name: getattr(module, name, None) for tensors in before for name in tensors}
        finally:
            module._parameters, module._buffers = before


def _without_values(module: nn.Module, copied: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module and its submodules whose parameters and buffers are all on the meta device."""
    if id(module) not in copied:
        part = copied[id(module)] = object.__new__(type(module))  # copy.copy refuses parametrized modules
        vars(part).update(vars(module))
        part._parameters = {
            n: p if p is None else like_parameter(p, p.detach().to("meta")) for n, p in part._parameters.items()
        }
        part._buffers = {n: b if b is None else b.detach().to("meta") for n, b in part._buffers.items()}
        part._modules = {n: m if m is None else _without_values(m, copied) for n, m in part._modules.items()}
    return copied[id(module)]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def temporary_buffers(module: nn.Module) -> set[str]:
    """The names of a module's buffers that `state_dict` leaves out."""
    return {
        f"{owner}.{name}".removeprefix(".")
        for owner, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def compiled_in_place(module: nn.Module) -> list[str]:
    """The names of submodules on which `Module.compile` was called; "" is the module itself."""
    return [name for name, part in module.named_modules() if part._compiled_call_impl is not None]


def tensor_aliases(module: nn.Module) -> dict[str, list[str]]:
    """The other names of each parameter or saved buffer that has several names in a module, by each of its names."""
    names: dict[int, list[str]] = {}  # by identity
    temporary = temporary_buffers(module)
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if name not in temporary:
            names.setdefault(id(tensor), []).append(name)
    several = [known for known in names.values() if len(known) > 1]
    return {name: [other for other in known if other != name] for known in several for name in known}


def shared_parameters(stages: Sequence[object]) -> list[list[tuple[int, str]]]:
    """The trained parameters with more than one name in stages that are modules, each as a tie of (stage, name)."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(stages):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    places.setdefault(id(parameter), []).append((stage, name))
    return [tie for tie in places.values() if len(tie) > 1]


def given_modules(entry: object) -> list[tuple[str, nn.Module]]:
    """The existing modules that a stage's entry copies, each with the prefix of its names in the stage."""
    layers = entry.items() if isinstance(entry, Mapping) else [("", entry)]
    modules = [(prefix, layer.module if isinstance(layer, ModuleCopy) else layer) for prefix, layer in layers]
    return [(prefix, module) for prefix, module in modules if isinstance(module, nn.Module)]


def shared_buffers(stages: Sequence[object]) -> list[list[tuple[int, str]]]:
    """The buffers that the modules of several stages, or of layers of one, share: each as a list of (stage, name)."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, entry in enumerate(stages):
        for prefix, module in given_modules(entry):
            for name, buffer in module.named_buffers(prefix):
                places.setdefault(id(buffer), []).append((stage, name))
    return [shared for shared in places.values() if len(shared) > 1]


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """The value, as a parameter if `tensor` is one, with the same requires_grad and attributes."""
    return like_parameter(tensor, value) if isinstance(tensor, nn.Parameter) else value


def like_parameter(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A new parameter with this value, and with the requires_grad and the attributes of `parameter`."""
    made = nn.Parameter(value, parameter.requires_grad)
    vars(made).update({**vars(parameter), **vars(made)})  # its own are those of torch, as where it is fake
    return made


def _required(init: Init) -> int:
    """How many arguments without a default an init has: the submodule, and perhaps its name."""
    try:
        parameters = inspect.signature(init).parameters.values()
    except (ValueError, TypeError):  # not written in Python
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _is_byte(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and not dtype.is_floating_point


def _unset(tensor: Tensor, byte: int) -> Tensor:
    """Memory for a tensor on the CPU, filled with a value that means unset; booleans and bytes with `byte`."""
    filler = byte if _is_byte(tensor.dtype) else _filler(tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").fill_(filler)


def _filler(dtype: torch.dtype) -> float:
    """A value that no init gives."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _unset_elements(value: Tensor) -> Tensor:
    """A mask of the elements that no init has written, as far as their values show."""
    if _is_byte(value.dtype):
        return torch.zeros((), dtype=torch.bool)
    inexact = value.is_floating_point() or value.is_complex()
    return value.isnan() if inexact else value == _filler(value.dtype)


def _is_given(tensor: Tensor, value: object, again: object) -> bool:
    """Whether inits have set a tensor to `value`; `again`: the value from another filler, which bytes must equal."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    if _is_byte(value.dtype):
        return isinstance(again, Tensor) and torch.equal(value, again)
    return not value.numel() or not bool(_unset_elements(value).all())
