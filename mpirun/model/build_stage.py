"""A stage's module, from its entry in `Model.stages`: with the same weights on every rank, for every cut.

A module that is given is the stage itself, no copy of it. Parameters and buffers have values from `Model.weights`, else
from the module, else from its init; tied ones then get the value of the tie's first. `stage_copies.py` builds stages
for other purposes.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mpirun.model.contract import Model
from mpirun.model.meta_values import MetaModule, MetaStage, initial_values, like
from mpirun.model.module_tensors import (
    given_modules,
    kept,
    own_tensors,
    replace_tensors,
    temporary_buffers,
    tensor_aliases,
    use_dense_gradients,
)
from mpirun.model.parallel_layers import SlicedDim, sliced_dims
from mpirun.model.rng import derived_seed, seed_generators
from schedgen.util.errors import UsageError, raised, raised_at


def weight_names(model: Model, stage: int, module: nn.Module, prefix: str = "") -> dict[str, list[str]]:
    """By parameter and saved buffer of a module, the names that weights may have for it, its entry name first.

    `module`: the stage, or a part of it whose names in the stage begin with `prefix`.
    """
    temporary = temporary_buffers(module)
    names, aliases = [name for name in own_tensors(module) if name not in temporary], tensor_aliases(module)
    return {
        name: _candidates(model, stage, [f"{prefix}{own}" for own in (name, *aliases.get(name, ()))]) for name in names
    }


def unused_names(model: Model) -> dict[str, list[str]]:
    """The same of what is in no stage, because the forward of the module that was split does not use it."""
    return {name: _candidates(model, 0, [name]) for name in model.origin.unused}


def _candidates(model: Model, stage: int, names: Sequence[str]) -> list[str]:
    untied = model._replace(tied=())
    known = [model.entry_name(stage, names[0])]
    known += [untied.entry_name(*place) for tie in model.tied if (stage, names[0]) in tie for place in tie]
    known += [untied.entry_name(stage, name) for name in names]
    return list(dict.fromkeys([*known, *(alias for name in known for alias in model.origin.aliases.get(name, ()))]))


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
        is_cut = dim is not None and slice.count > 1
        expected = dim.full_shape(tensor.shape, slice) if dim is not None and is_cut else tuple(tensor.shape)
        if tuple(value.shape) != expected:
            raise UsageError(f"weights: {name} has shape {tuple(value.shape)}, but {expected} in the model")
        if value.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise UsageError(f"weights: {name} is {value.dtype}, but {tensor.dtype} in the model")
        if dim is not None and is_cut:
            value = dim.share(value, slice)
        copied = not (self.mapped and tensor.requires_grad)
        return value.to(tensor.dtype, copy=copied, memory_format=torch.contiguous_format)


def build_stage(model: Model, stage: int, seed: int, values: bool = True, mapped: bool = False) -> nn.Module:
    """The module of a stage, its weights seeded by the names of its layers, or else by the stage's index.

    Tied parameters have the value of the tie's first; if the stage has a parameter twice, both become one. UsageError
    if the model's function fails, a tie names no parameter, or weights do not fit.

    values  False: trained parameters need none, since another rank has them
    mapped  trained parameters may lie in memory that is mapped from a file: the caller copies them
    """
    return StageBuilder(model, stage, seed, lambda _, tensor: values or not tensor.requires_grad, mapped).build()


class StageBuilder:
    """Builds one stage."""

    def __init__(
        self,
        model: Model,
        stage: int,
        seed: int = 0,
        needs_value: NeedsValue | None = None,
        mapped: bool = False,
        making: AbstractContextManager[object] | None = None,
    ) -> None:
        """`needs_value`: None: no tensor gets a value; `making`: the context in which the author's functions run."""
        self.model, self.stage, self.seed, self.mapped = model, stage, seed, mapped
        self.values = None if needs_value is None else StageValues(model, stage, needs_value, mapped)
        self.making = nullcontext() if making is None else making

    def build(self) -> nn.Module:
        """The stage's module, with its ties."""
        model, stage = self.model, self.stage
        module = self.untied()
        if model.reads is None and model.origin.call is None:
            _take_as_given(module)
        for tie in model.tied:
            if any(place == stage for place, _ in tie) and not model.ties_slices(tie):  # slices of one stage are equal
                self._apply_tie(module, tie)
        return module

    def untied(self) -> nn.Module:
        """The module as its entry builds it. An attribute `seeded` of the entry replaces the stage in its seed."""
        entry = self.model.stages[self.stage]
        if isinstance(entry, nn.Module):
            return self._layer(entry, "", "")
        if isinstance(entry, Mapping):
            layers = OrderedDict((name, self._layer(make, name, f"{name}.")) for name, make in entry.items())
            return nn.Sequential(layers)
        return self._layer(entry, getattr(entry, "seeded", f"stage {self.model.model_stage(self.stage)}"), "")

    def _layer(self, make: Callable[[], nn.Module] | nn.Module, seeded: str, prefix: str) -> nn.Module:
        """A layer, or the whole stage; `prefix`: what its names in the stage begin with."""
        stage = self.model.model_stage(self.stage)
        seed_generators(derived_seed(self.seed, seeded))
        try:
            with self.making:
                module = make if isinstance(make, nn.Module) else make()
            if not isinstance(module, nn.Module):
                raise UsageError(f"it should be an nn.Module, not {type(module).__name__}")
            if self.values is not None:
                self.values.give(module, make, prefix)
        except (Exception, SystemExit) as error:
            why = error if isinstance(error, UsageError) else f"{raised(error)}{raised_at(error)}"
            raise UsageError(f"stage {stage} of the model cannot be built: {why}") from error
        use_dense_gradients(module)
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                vars(part)["flatten_parameters"] = _stay  # it would move them out of flat weights
        return module

    def _apply_tie(self, module: nn.Module, tie: Sequence[tuple[int, str]]) -> None:
        """Give this stage's parameters of a tie the value of its first, and make them one."""
        first_stage, first_name = tie[0]
        names = [name for place, name in tie if place == self.stage]
        tied = {name: _parameter(module, self.stage, name) for name in names}
        parameter = tied[names[0]]
        if first_stage == self.stage:
            self._check_alike(tied, tie[0], parameter)
        else:
            values = self.values
            copied = values is not None and values.needs_value(names[0], parameter) and names[0] not in values.loaded
            needs_first = None if values is None else lambda name, _: copied and name == first_name
            builder = StageBuilder(self.model, first_stage, self.seed, needs_first, self.mapped, self.making)
            with given_apart(self.model, first_stage, copied=False):
                first = _parameter(builder.untied(), *tie[0])
                self._check_alike(tied, tie[0], first)
            # Not inside: this stage may have been given the same module, which gets back what it had.
            if values is not None and parameter.is_meta:
                value = first.detach().clone() if copied else torch.empty_like(parameter, device="cpu")
                tied[names[0]] = like(parameter, value)  # type: ignore[assignment]
                for part in (module, *self._sources()):
                    replace_tensors(part, {id(parameter): tied[names[0]]})
            elif copied:
                parameter.data.copy_(first.data)
        for name in names[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, tied[names[0]])

    def _check_alike(self, tied: Mapping[str, nn.Parameter], place: tuple[int, str], first: nn.Parameter) -> None:
        """UsageError unless this stage's parameters of a tie, by name, are like the tie's first, at `place`."""
        for name, parameter in tied.items():
            if _kind(parameter) != _kind(first):
                raise UsageError(
                    f"the model ties {place[1]} of stage {place[0]}, {_kind(first)}, to {name} of stage {self.stage}, "
                    f"{_kind(parameter)}"
                )

    def _sources(self) -> list[nn.Module]:
        """The modules whose tensors those of the stage are, where it is on the meta device."""
        entry = self.model.stages[self.stage]
        makes = entry.values() if isinstance(entry, Mapping) else [entry]
        return [make.source.module for make in makes if isinstance(make, MetaStage)]


@contextmanager
def given_apart(model: Model, stage: int, copied: bool) -> Iterator[None]:
    """Inside, the modules that a stage was given as may get values: in the end they have those from before.

    `copied`: tensors that have values are copied, too, so that what changes them in place does not change the module's.
    """
    given = [module for _, module in given_modules(model.stages[stage])]
    with kept(given):
        for module in given:
            replaced = [x for x in own_tensors(module).values() if copied or x.is_meta]
            replace_tensors(module, {id(x): like(x, x.detach().clone()) for x in replaced})
        yield


def _kind(parameter: Tensor) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"{parameter.dtype} of shape {tuple(parameter.shape)}, {trained}"


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise UsageError(f"the model ties {name} of stage {stage}, which has no such parameter") from None


def _stay() -> None:
    """Leave the parameters of an LSTM or GRU where they are: cuDNN copies them in every forward."""


def _take_as_given(stage: nn.Module) -> None:
    """Pass the arguments of a stage without `reads` as one tuple if its forward takes fewer, as an nn.Sequential does.

    The first call shows how many arguments there are; if the stage's forward takes them, the hook is removed.
    """

    def before(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            inspect.signature(stage.forward).bind(*arguments)
        except TypeError:
            return (arguments,) if len(arguments) > 1 else arguments
        hook.remove()
        return arguments

    hook = stage.register_forward_pre_hook(before)
