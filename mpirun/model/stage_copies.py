"""A stage's module for other purposes than a run's steps: without values, with values of its own, with given values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode

from mpirun.model.build_stage import StageBuilder, build_stage, given_apart
from mpirun.model.contract import Model
from mpirun.model.meta_values import like
from mpirun.model.module_tensors import kept, own_tensors, replace_tensors
from schedgen.util.errors import UsageError


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
def stage_without_values(model: Model, stage: int, fake: FakeTensorMode) -> Iterator[nn.Module]:
    """Inside, the module of a stage has fake parameters and buffers, of the mode `fake`: no weights are read.

    Functions that build it run in `fake`, so that nothing is initialised. If that fails, as when a constructor asks for
    values, they run as usual.
    """
    try:
        module = StageBuilder(model, stage, making=fake).build()
    except UsageError:
        module = StageBuilder(model, stage).build()
    with kept([module]):
        replace_tensors(module, {id(x): like(x, _fake_of(x, fake)) for x in own_tensors(module).values()})
        yield module


def _fake_of(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU with the strides that a run's has, in which trained parameters are contiguous."""
    detached = tensor.detach()
    if not fake.is_our_fake(tensor):
        detached = fake.from_tensor(torch.empty_like(detached, device="cpu") if tensor.is_meta else detached)
    return detached.contiguous() if tensor.requires_grad else detached


@contextmanager
def stage_apart(model: Model, stage: int, seed: int = 0) -> Iterator[nn.Module]:
    """Inside, a stage's module has tensors of its own, with the values that it has now, or begins with if it has none.

    The module that was given, if there is one, has its own tensors again in the end.
    """
    with given_apart(model, stage, copied=True):
        yield build_stage(model, stage, seed)


def stage_with(model: Model, stage: int, values: Mapping[str, Tensor]) -> nn.Module:
    """The module of a stage, with these values, by name, of which buffers and frozen ones are copied.

    Trained are the parameters whose value requires a gradient. The caller keeps what the modules that were given had.
    """
    module = StageBuilder(model, stage).build()
    for name, tensor in own_tensors(module).items():
        value = values[name].detach() if values[name].requires_grad else values[name].clone()
        if tensor.is_meta:
            replace_tensors(module, {id(tensor): like(tensor, value)})
        else:
            tensor.data = value
            if tensor.is_leaf:
                tensor.requires_grad_(values[name].requires_grad)
    return module
