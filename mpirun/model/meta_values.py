"""Values for modules on the meta device, which have none: a rank gives them to the stages that it builds.

Each submodule's values are seeded by its name, for every cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class MetaStage:
    """A stage, or a layer of one, whose tensors are on the meta device.

    `source`: the module that has the tensors of `module` under the same names, and what gives it values.
    """

    module: nn.Module
    source: MetaModule
    seeded: ClassVar[str] = "module"  # modules are seeded by this word and the run's seed: the same for all stages

    def __call__(self) -> nn.Module:
        """The module."""
        return self.module


def initial_values(source: MetaModule, unset: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Values for tensors on the meta device, by name; UsageError if nothing gives a value to one of them."""
    by_owner: dict[str, dict[str, Tensor]] = {}
    for name, tensor in unset.items():
        owner, _, attribute = name.rpartition(".")
        by_owner.setdefault(owner, {})[attribute] = tensor
    initialiser, values = _Initialiser(source), dict[str, Tensor]()
    for owner, needed in by_owner.items():
        made = initialiser.values(owner, needed, derived_seed(seed, owner))
        values |= {f"{owner}.{attribute}".removeprefix("."): made[attribute] for attribute in needed}
    return values


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
        return without_values(self.source.module)

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


def without_values(module: nn.Module, copied: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of a module and its submodules whose parameters and buffers are all on the meta device."""
    copied = {} if copied is None else copied
    if id(module) not in copied:
        part = copied[id(module)] = object.__new__(type(module))  # copy.copy refuses parametrized modules
        vars(part).update(vars(module))
        part._parameters = {
            n: p if p is None else like_parameter(p, p.detach().to("meta")) for n, p in part._parameters.items()
        }
        part._buffers = {n: b if b is None else b.detach().to("meta") for n, b in part._buffers.items()}
        part._modules = {n: m if m is None else without_values(m, copied) for n, m in part._modules.items()}
    return copied[id(module)]


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
