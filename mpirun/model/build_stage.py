"""A stage's module, built from its entry in `Model.stages`: with the same weights on every rank, for every cut.

Parameters and buffers get their values from `Model.weights` if it has them, else from the code that builds the stage.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from mpirun.model.contract import Model
from mpirun.model.module_copy import ModuleCopy, compiled_in_place, like, own_tensors
from mpirun.model.parallel_layers import Shard, ShardedDim, sharded_dims
from mpirun.model.parameter_checks import check_parameters
from mpirun.model.rng import derived_seed, seed_generators
from mpirun.model.weight_names import lack, weight_names
from schedgen.util.errors import MpirunWarning, UsageError, raised

NeedsValues = Callable[[str, Tensor], bool]  # takes a name in the stage, and its parameter or buffer
# Modules with tensors of their own that a stage's function has returned, each with those that became fake.
_RETURNED: MutableMapping[nn.Module, dict[int, Tensor]] = WeakIdKeyDictionary()


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


def stage_without_values(model: Model, stage: int, fake: FakeTensorMode) -> nn.Module:
    """The module of a stage, with fake parameters and buffers, of the mode `fake`: no weights are read.

    Functions that build it run in `fake`, so that nothing is initialised; copies of existing modules, which cannot be
    made in `fake`, are made outside. If that fails, as when a constructor asks for values, the functions run as usual.
    """
    try:
        module = _Builder(model, stage, 0, lambda *_: False, making=fake).build()
    except UsageError:
        module = _Builder(model, stage, 0, lambda *_: False).build()
    real = [tensor for tensor in own_tensors(module).values() if not fake.is_our_fake(tensor)]
    fakes = {id(tensor): like(tensor, fake.from_tensor(tensor.detach())) for tensor in real}
    replace_tensors(module, fakes)
    before = {id(fakes[id(tensor)]): tensor for tensor in real}
    for part in module.modules():
        if part in _RETURNED:
            _RETURNED[part] = before
    return module


def whole_shape(tensor: Tensor, dim: ShardedDim | None, shard: Shard) -> tuple[int, ...]:
    """The shape of a tensor in the weights; a tensor shard has a share of it along `dim`, or all of it if None."""
    return tuple(tensor.shape) if dim is None or shard.count == 1 else dim.full_shape(tensor.shape, shard)


def replace_tensors(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers of a module; `new`: the new tensors, by the id of the old one."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if id(old) in new:
                    tensors[name] = new[id(old)]  # type: ignore[assignment]


def _check_new(module: nn.Module) -> None:
    """UsageError if a part of a module that a function returns was returned before; it gets its own tensors back."""
    parts = [part for part in module.modules() if part._parameters or part._buffers]
    for part in parts:
        if part in _RETURNED:
            replace_tensors(module, _RETURNED[part])
            raise UsageError(
                f"its function returns the same {type(part).__name__} every time: let it make a new one, or give the "
                "module itself in place of the function"
            )
    _RETURNED.update({part: {} for part in parts})


class _Builder:
    """Builds one stage."""

    def __init__(
        self,
        model: Model,
        stage: int,
        seed: int,
        needs_values: NeedsValues,
        mapped: bool = False,
        making: AbstractContextManager[object] | None = None,
    ) -> None:
        """`making`: the context in which functions of the model's author run."""
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
            if any(place == stage for place, _ in tie) and not model.ties_shards(tie):  # shards of one stage are equal
                self._apply_tie(module, tie)
        if self.missing and not hasattr(model.weights, "names"):  # else check_weights has warned of it
            warnings.warn(lack(self.missing, f"weights of stage {stage}"), MpirunWarning, stacklevel=3)
        return module

    def _apply_tie(self, module: nn.Module, tie: Sequence[tuple[int, str]]) -> None:
        first_stage, first_name = tie[0]
        names = [name for place, name in tie if place == self.stage]
        copies = [_parameter(module, self.stage, name) for name in names]
        kept = copies[0]
        copied = self.needs_values(names[0], kept) and names[0] not in self.loaded
        first_module = module
        if first_stage != self.stage:

            def needs_values(name: str, _: Tensor) -> bool:
                return copied and name == first_name

            first_module = _Builder(self.model, first_stage, self.seed, needs_values, self.mapped, self.making).untied()
        first = _parameter(first_module, first_stage, first_name)
        for name, parameter in zip(names, copies, strict=True):
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
        if copied and kept is not first:
            kept.data.copy_(first.data)
        for name in names[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, kept)

    def untied(self) -> nn.Module:
        """The module as its entry builds it. An attribute `seeded` of the entry replaces the stage in its seed."""
        entry = self.model.stages[self.stage]
        if isinstance(entry, nn.Module):
            return self._layer(ModuleCopy(entry), "", "")
        if isinstance(entry, Mapping):
            layers = OrderedDict((name, self._layer(make, name, f"{name}.")) for name, make in entry.items())
            return nn.Sequential(layers)
        return self._layer(entry, getattr(entry, "seeded", f"stage {self.model.model_stage(self.stage)}"), "")

    def _layer(self, make: Callable[[], nn.Module], seeded: str, prefix: str) -> nn.Module:
        """Build a layer, or the whole stage; `prefix`: what its names in the stage begin with."""
        stage = self.model.model_stage(self.stage)
        seed_generators(derived_seed(self.seed, seeded))

        def needs_values(name: str, tensor: Tensor) -> bool:
            return self.needs_values(f"{prefix}{name}", tensor)

        try:
            with self.making:
                module = make.module if isinstance(make, ModuleCopy) else make()
            if isinstance(module, nn.Module):
                if not isinstance(make, ModuleCopy):
                    _check_new(module)
                check_parameters(module, type(module).__name__)
                if isinstance(make, ModuleCopy) and compiled_in_place(module):
                    lost = f"stage {stage}: Module.compile is lost where a stage is copied: use torch.compile(module)"
                    warnings.warn(lost, MpirunWarning, stacklevel=4)
                values = self._load(module, prefix)
                if isinstance(make, ModuleCopy):
                    module = make.build(values, needs_values)
                else:
                    module = _with_values(module, values, needs_values)
                for part in module.modules():
                    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                        part.sparse = False  # gradients are added up in dense buffers
                    elif isinstance(part, nn.RNNBase):
                        vars(part)["flatten_parameters"] = _stay  # it would move them out of flat weights
                for parameter in module.parameters():
                    if parameter.requires_grad:  # as in the flat weights of a run
                        parameter.data = parameter.data.contiguous()
                return module
        except UsageError as error:
            raise UsageError(f"stage {stage} of the model cannot be built: {error}") from None
        except (Exception, SystemExit) as error:
            raise UsageError(f"stage {stage} of the model cannot be built: {raised(error)}") from None
        raise UsageError(f"stage {stage} of the model should be an nn.Module, not {type(module).__name__}")

    def _load(self, module: nn.Module, prefix: str) -> dict[str, Tensor]:
        """The values that `weights` has for a layer, by name in the layer."""
        if self.model.weights is None:
            return {}
        tensors = {
            name: tensor for name, tensor in own_tensors(module).items() if self.needs_values(f"{prefix}{name}", tensor)
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
        """A weight converted for the module's parameter or buffer `name`: this shard's share, in the module's type."""
        tensor = own_tensors(module)[name]
        shard, dim = self.model.shard_of(self.stage), sharded_dims(module).get(name)
        expected = whole_shape(tensor, dim, shard)
        if tuple(value.shape) != expected:
            raise UsageError(f"weights: {weight} has shape {tuple(value.shape)}, but {expected} in the model")
        if value.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise UsageError(f"weights: {weight} is {value.dtype}, but {tensor.dtype} in the model")
        if dim is not None and shard.count > 1:
            value = dim.share(value, shard)
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


def _with_values(module: nn.Module, values: Mapping[str, Tensor], needs_values: NeedsValues) -> nn.Module:
    """The module with these values, by name; UsageError if another tensor needs values and is on the meta device."""
    new: dict[int, Tensor] = {}
    for name, tensor in own_tensors(module).items():
        if name in values:
            new[id(tensor)] = like(tensor, values[name])
        elif tensor.is_meta and needs_values(name, tensor):
            raise UsageError(f"{name} is on the meta device, and no weights give it values")
        elif tensor.is_meta:
            new[id(tensor)] = like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    replace_tensors(module, new)
    return module


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise UsageError(f"the model ties {name} of stage {stage}, which has no such parameter") from None
