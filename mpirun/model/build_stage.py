"""A stage's module, from its entry in `Model.stages`: with the same weights on every rank, for every cut.

A module that is given is the stage itself, no copy of it. Parameters and buffers get their values from `Model.weights`
if it has them, else from the module, or the code that builds it.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from mpirun.model.contract import Model
from mpirun.model.meta_values import MetaModule, MetaStage, initial_values, like
from mpirun.model.module_tensors import given_modules, kept, own_tensors, replace_tensors
from mpirun.model.parallel_layers import Slice, SlicedDim, sliced_dims
from mpirun.model.parameter_checks import check_parameters
from mpirun.model.rng import derived_seed, seed_generators
from mpirun.model.weight_names import lack, weight_names
from schedgen.util.errors import MpirunWarning, UsageError, raised

NeedsValues = Callable[[str, Tensor], bool]  # takes a name in the stage, and its parameter or buffer
_RETURNED: MutableMapping[nn.Module, None] = (
    WeakIdKeyDictionary()
)  # modules with tensors of their own that a stage's function has returned


def build_stage(model: Model, stage: int, seed: int, values: bool = True, mapped: bool = False) -> nn.Module:
    """The module of a stage, its weights seeded by the names of its layers, or else by the stage's index.

    Tied parameters have the value of the tie's first; if the stage has a parameter twice, both become one. UsageError
    if the model's function fails, a tie names no parameter, a parameter has a hook, or weights do not fit.

    values  False: trained parameters need none, since another rank has them
    mapped  trained parameters may lie in memory that is mapped from a file: the caller copies them
    """
    return _Builder(model, stage, seed, lambda _, tensor: values or not tensor.requires_grad, mapped).build()


class _NoMemo(FakeTensorConverter):
    """Keeps no weak references to fake tensors: torch cannot convert a module (`to`) whose parameters have them."""

    def set_tensor_memo(self, t: Tensor, v: Tensor) -> None:
        pass


def fake_mode() -> FakeTensorMode:
    """A mode in which modules are built and run without data; real tensors that they refer to become fake."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.fake_tensor_converter = _NoMemo()
    return fake


@contextmanager
def stage_without_values(
    model: Model, stage: int, fake: FakeTensorMode
) -> Iterator[tuple[nn.Module, Mapping[int, str]]]:
    """Inside, the module of a stage has fake parameters and buffers, of the mode `fake`: no weights are read.

    Yields the module, and the names of the tensors that it has outside, by their ids. Functions that build it run in
    `fake`, so that nothing is initialised. If that fails, as when a constructor asks for values, they run as usual.
    """
    try:
        module = _Builder(model, stage, 0, None, making=fake).build()
    except UsageError:
        module = _Builder(model, stage, 0, None).build()
    with kept([module]):
        own = own_tensors(module)
        replace_tensors(module, {id(x): like(x, _fake_of(x, fake)) for x in own.values()})
        yield module, {id(x): name for name, x in own.items()}


def _fake_of(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU with the strides that a run's has, in which trained parameters are contiguous."""
    detached = tensor.detach()
    if not fake.is_our_fake(tensor):
        detached = fake.from_tensor(torch.empty_like(detached, device="cpu") if tensor.is_meta else detached)
    return detached.contiguous() if tensor.requires_grad else detached


@contextmanager
def stage_apart(model: Model, stage: int, seed: int = 0) -> Iterator[tuple[nn.Module, Mapping[int, str]]]:
    """Inside, a stage's module has tensors of its own, with the values that it has now, or begins with if it has none.

    The module that was given, if there is one, has its own tensors again in the end. Yields as `stage_without_values`.
    """
    given = given_modules(model.stages[stage])
    names = {id(x): f"{prefix}.{name}".removeprefix(".") for prefix, m in given for name, x in own_tensors(m).items()}
    with _given_apart(model, stage, copied=True):
        yield build_stage(model, stage, seed), names


def stage_with(model: Model, stage: int, values: Mapping[str, Tensor]) -> nn.Module:
    """The module of a stage, with these values, by name, of which buffers and frozen ones are copied.

    Trained are the parameters whose value requires a gradient. The caller keeps what the modules that were given had.
    """
    module = _Builder(model, stage, 0, None).build()
    for name, tensor in own_tensors(module).items():
        value = values[name].detach() if values[name].requires_grad else values[name].clone()
        if tensor.is_meta:
            replace_tensors(module, {id(tensor): like(tensor, value)})
        else:
            tensor.data = value
            if tensor.is_leaf:
                tensor.requires_grad_(values[name].requires_grad)
    return module


@contextmanager
def _given_apart(model: Model, stage: int, copied: bool) -> Iterator[None]:
    """Inside, the modules that a stage was given as may get values: in the end they have those from before.

    `copied`: tensors that have values are copied, too, so that what changes them in place does not change the module's.
    """
    given = [module for _, module in given_modules(model.stages[stage])]
    with kept(given):
        for module in given:
            own = [x for x in own_tensors(module).values() if copied or x.is_meta]
            replace_tensors(module, {id(x): like(x, x.detach().clone()) for x in own})
        yield


def whole_shape(tensor: Tensor, dim: SlicedDim | None, slice: Slice) -> tuple[int, ...]:
    """The shape of a tensor in the weights; a tensor slice has a share of it along `dim`, or all of it if None."""
    return tuple(tensor.shape) if dim is None or slice.count == 1 else dim.full_shape(tensor.shape, slice)


def _check_new(module: nn.Module) -> None:
    """UsageError if a part of a module that a function returns was returned before."""
    for part in module.modules():
        if part._parameters or part._buffers:
            if part in _RETURNED:
                raise UsageError(
                    f"its function returns the same {type(part).__name__} every time: let it make a new one, or give "
                    "the module itself in place of the function"
                )
            _RETURNED[part] = None


class _Builder:
    """Builds one stage."""

    def __init__(
        self,
        model: Model,
        stage: int,
        seed: int,
        needs_values: NeedsValues | None,
        mapped: bool = False,
        making: AbstractContextManager[object] | None = None,
    ) -> None:
        """`needs_values`: None: no tensor gets a value; `making`: the context in which the author's functions run."""
        self.model, self.stage, self.seed, self.needs_values, self.mapped = model, stage, seed, needs_values, mapped
        self.making = nullcontext() if making is None else making
        self.loaded: set[str] = set()  # names of the values that `weights` gave
        self.missing: list[str] = []

    def build(self) -> nn.Module:
        """The stage's module, with its ties."""
        model, stage = self.model, self.stage
        module = self.untied()
        if model.reads is None:
            _take_as_given(module)
        for tie in model.tied:
            if any(place == stage for place, _ in tie) and not model.ties_slices(tie):  # slices of one stage are equal
                self._apply_tie(module, tie)
        if self.missing and not hasattr(model.weights, "names"):  # else check_weights has warned of it
            warnings.warn(lack(self.missing, f"weights of stage {stage}"), MpirunWarning, stacklevel=3)
        return module

    def _apply_tie(self, module: nn.Module, tie: Sequence[tuple[int, str]]) -> None:
        first_stage, first_name = tie[0]
        names = [name for place, name in tie if place == self.stage]
        copies = [_parameter(module, self.stage, name) for name in names]
        of_stage = dict(zip(names, copies, strict=True))
        copied = self._needs_value(names[0], copies[0]) and names[0] not in self.loaded
        if first_stage == self.stage:
            self._make_alike(of_stage, tie[0], _parameter(module, *tie[0]), copied)
        else:

            def needs_values(name: str, _: Tensor) -> bool:
                return copied and name == first_name

            wanted = needs_values if self.needs_values else None
            builder = _Builder(self.model, first_stage, self.seed, wanted, self.mapped, self.making)
            with _given_apart(self.model, first_stage, copied=False):
                first = _parameter(builder.untied(), *tie[0])
                self._make_alike(of_stage, tie[0], first, copied)
            if self.needs_values and copies[0].is_meta:
                value = first.detach() if copied else torch.empty_like(copies[0], device="cpu")
                kept, copies[0] = copies[0], like(copies[0], value.clone())  # type: ignore[call-overload]
                for part in (module, *self._sources()):
                    replace_tensors(part, {id(kept): copies[0]})
        for name in names[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, copies[0])

    def _make_alike(
        self, of_stage: Mapping[str, nn.Parameter], place: tuple[int, str], first: nn.Parameter, copied: bool
    ) -> None:
        """Check that this stage's parameters of a tie, by name, are like its first; if `copied`, give one its value."""
        first_stage, first_name = place
        for name, parameter in of_stage.items():
            if (parameter.shape, parameter.dtype) != (first.shape, first.dtype):
                raise UsageError(
                    f"the model ties {first_name} of stage {first_stage}, {first.dtype} of shape "
                    f"{tuple(first.shape)}, to {parameter.dtype} of shape {tuple(parameter.shape)} "
                    f"in stage {self.stage}"
                )
            if parameter.requires_grad != first.requires_grad:
                one, other = ("trained", "frozen") if first.requires_grad else ("frozen", "trained")
                raise UsageError(
                    f"the model ties {first_name} of stage {first_stage}, which is {one}, to {name} of stage "
                    f"{self.stage}, which is {other}"
                )
        kept = next(iter(of_stage.values()))
        if copied and kept is not first and not kept.is_meta:
            kept.data.copy_(first.data)

    def untied(self) -> nn.Module:
        """The module as its entry builds it. An attribute `seeded` of the entry replaces the stage in its seed."""
        entry = self.model.stages[self.stage]
        if isinstance(entry, nn.Module):
            return self._layer(entry, "", "")
        if isinstance(entry, Mapping):
            layers = OrderedDict((name, self._layer(make, name, f"{name}.")) for name, make in entry.items())
            return nn.Sequential(layers)
        return self._layer(entry, getattr(entry, "seeded", f"stage {self.model.model_stage(self.stage)}"), "")

    def _sources(self) -> list[nn.Module]:
        """The modules whose tensors those of the stage are, where it is on the meta device."""
        entry = self.model.stages[self.stage]
        makes = entry.values() if isinstance(entry, Mapping) else [entry]
        return [make.source.module for make in makes if isinstance(make, MetaStage)]

    def _needs_value(self, name: str, tensor: Tensor) -> bool:
        return self.needs_values is not None and self.needs_values(name, tensor)

    def _layer(self, make: Callable[[], nn.Module] | nn.Module, seeded: str, prefix: str) -> nn.Module:
        """A layer, or the whole stage; `prefix`: what its names in the stage begin with."""
        stage = self.model.model_stage(self.stage)
        seed_generators(derived_seed(self.seed, seeded))
        try:
            with self.making:
                module = make if isinstance(make, nn.Module) else make()
            if isinstance(module, nn.Module):
                if not isinstance(make, nn.Module | MetaStage):
                    _check_new(module)
                check_parameters(module, type(module).__name__)
                if self.needs_values is not None:
                    self._give_values(module, make, prefix)
                for part in module.modules():
                    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                        part.sparse = False  # gradients are added up in dense buffers
                    elif isinstance(part, nn.RNNBase):
                        vars(part)["flatten_parameters"] = _stay  # it would move them out of flat weights
                return module
        except UsageError as error:
            raise UsageError(f"stage {stage} of the model cannot be built: {error}") from None
        except (Exception, SystemExit) as error:
            raise UsageError(f"stage {stage} of the model cannot be built: {raised(error)}") from None
        raise UsageError(f"stage {stage} of the model should be an nn.Module, not {type(module).__name__}")

    def _give_values(self, module: nn.Module, make: object, prefix: str) -> None:
        """Give a module the values that `weights` has for it, and values to those on the meta device that need some."""
        values, seed, tensors = self._load(module, prefix), torch.initial_seed(), own_tensors(module)
        tied = {
            name for tie in self.model.tied if tie[0][0] != self.stage for place, name in tie if place == self.stage
        }
        tied -= {prefix + name for name in values}  # these get the value of the tie's first
        on_meta = {name: x for name, x in tensors.items() if x.is_meta and prefix + name not in tied}
        unset = {name: x for name, x in on_meta.items() if name not in values and self._needs_value(prefix + name, x)}
        source = make.source if isinstance(make, MetaStage) else MetaModule(module, None)
        if unset and not isinstance(make, nn.Module | MetaStage):
            raise UsageError(f"{next(iter(unset))} is on the meta device, and no weights give it values")
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
        """The values that `weights` has for a layer, by name in the layer."""
        if self.model.weights is None:
            return {}
        tensors = {
            name: tensor for name, tensor in own_tensors(module).items() if self._needs_value(f"{prefix}{name}", tensor)
        }
        names = {n: c for n, c in weight_names(self.model, self.stage, module, prefix).items() if n in tensors}
        given = dict(self.model.weights([candidate for candidates in names.values() for candidate in candidates]))
        values = {}
        for name, candidates in names.items():
            found = [candidate for candidate in candidates if candidate in given]
            if found:
                values[name] = self._fitted(found[0], given[found[0]], name, module)
                self.loaded.add(f"{prefix}{name}")
            else:
                self.missing.append(candidates[0])
        return values

    def _fitted(self, weight: str, value: Tensor, name: str, module: nn.Module) -> Tensor:
        """A weight converted for the module's parameter or buffer `name`: this slice's share, in the module's type."""
        tensor = own_tensors(module)[name]
        slice, dim = self.model.slice_of(self.stage), sliced_dims(module).get(name)
        expected = whole_shape(tensor, dim, slice)
        if tuple(value.shape) != expected:
            raise UsageError(f"weights: {weight} has shape {tuple(value.shape)}, but {expected} in the model")
        if value.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise UsageError(f"weights: {weight} is {value.dtype}, but {tensor.dtype} in the model")
        if dim is not None and slice.count > 1:
            value = dim.share(value, slice)
        copied = not (self.mapped and tensor.requires_grad)
        return value.to(tensor.dtype, copy=copied, memory_format=torch.contiguous_format)


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


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise UsageError(f"the model ties {name} of stage {stage}, which has no such parameter") from None
