"""Values for modules on the meta device, which have none: a rank gives them to the stages that it builds.

Each submodule's values are seeded by its name, for every cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError

Init = Callable[[nn.Module], Any]  # sets the values of a submodule's own parameters and buffers in place


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class MetaModule(NamedTuple):
    """A module on the meta device, and the function that gives values to its submodules."""

    module: nn.Module
    init: Init | None  # None: _init_weights of the model, or the submodule's reset_parameters


def meta_module(module: nn.Module, init: Init | None) -> MetaModule | None:
    """The `MetaModule` of a module; None if the module has values, and then UsageError if there is an `init`."""
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
    """Values for tensors on the meta device, by name; UsageError if nothing gives a value to one of them.

    The tensors of one submodule at a time get them, by `init` or else by the model's own `_init_weights`, as
    transformers' models have it: called for the submodule and then for the modules around it, which may set its
    parameters. If values are still missing, all are called again after the submodule's `reset_parameters`.
    """
    if not unset:
        return {}
    by = "init" if source.init else "neither _init_weights nor reset_parameters"
    by_owner: dict[str, list[str]] = {}
    for name in unset:
        owner, _, attribute = name.rpartition(".")
        by_owner.setdefault(owner, []).append(attribute)
    root, values = without_values(source.module), dict[str, Tensor]()  # inits change this copy
    for owner, needed in by_owner.items():
        part = root.get_submodule(owner)
        ways: list[list[Callable[[], Any]]] = [[partial(source.init, part)]] if source.init else []
        if not ways:
            inits, reset = _model_inits(root, owner), getattr(part, "reset_parameters", None)
            ways = [way for way in (inits, [*([reset] if reset else []), *inits]) if way]
        made: dict[str, Tensor] = {}
        for way in ways:
            made = _set_by(way, part, needed, derived_seed(seed, owner))
            if len(made) == len(needed) and not any(_unset_elements(value).any() for value in made.values()):
                break
        values |= {f"{owner}.{attribute}".removeprefix("."): value for attribute, value in made.items()}
    if missing := [name for name in unset if name not in values]:
        raise UsageError(
            f"{missing[0]} is on the meta device, and {by} gives it {'no ' * bool(source.init)}values: init should"
        )
    return values


def _model_inits(root: nn.Module, owner: str) -> list[Callable[[], Any]]:
    """Calls of `_init_weights`, each of the innermost model: for a submodule, then for the modules around it."""
    calls: list[Callable[[], Any]] = []
    init, parts = None, owner.split(".") if owner else []
    for depth in range(len(parts) + 1):
        name = ".".join(parts[:depth])
        part = root.get_submodule(name)
        nearest = getattr(part, "_init_weights", None)
        init = nearest if nearest is not None and _takes_one(nearest) else init
        if init is not None:
            calls.insert(0, partial(init, part))
    return calls


def _set_by(inits: Sequence[Callable[[], Any]], part: nn.Module, names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Those of a module's own tensors of these names that inits set, with their values."""
    tensors = {**part._parameters, **part._buffers}
    before = {name: tensor for name in names if (tensor := tensors.get(name)) is not None}
    own = part._parameters, part._buffers
    part._parameters = {n: p if p is None else like(p, _unset(p)) for n, p in own[0].items()}  # type: ignore[misc]
    part._buffers = {n: b if b is None else _unset(b) for n, b in own[1].items()}
    unset = [getattr(part, name) for name in before]
    versions = {id(tensor): tensor._version for tensor in unset}
    seed_generators(seed)
    try:
        with torch.no_grad():
            for init in inits:
                init()
        values: dict[str, Any] = {name: getattr(part, name, None) for name in before}
    finally:
        part._parameters, part._buffers = own
    return {name: values[name] for name, meta in before.items() if _is_set(meta, values[name], versions)}


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


def _takes_one(method: Callable[..., Any]) -> bool:
    """Whether a method takes a submodule: other models have a method of this name for all of them."""
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    return True


def _unset(tensor: Tensor) -> Tensor:
    """Memory for a tensor on the CPU, filled with a value that means unset."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").fill_(_filler(tensor.dtype))


def _filler(dtype: torch.dtype) -> float:
    """A value that no init gives; booleans and bytes have none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype.itemsize == 1 else torch.iinfo(dtype).max


def _unset_elements(value: Tensor) -> Tensor:
    """A mask of the elements that no init has written, as far as their values show."""
    if value.is_floating_point() or value.is_complex():
        return value.isnan()
    return value == _filler(value.dtype) if value.dtype.itemsize > 1 else torch.zeros((), dtype=torch.bool)


def _is_set(tensor: Tensor, value: object, versions: Mapping[int, int]) -> bool:
    """Whether inits have set a tensor to `value`; `versions`: of the tensors that they got, by id."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    if value.dtype.itemsize == 1 and not value.is_floating_point():
        return value._version != versions.get(id(value))
    return not value.numel() or not bool(_unset_elements(value).all())
