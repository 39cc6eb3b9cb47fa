"""A LocalStage computes what its module computes, wherever its weights have been in the meantime."""

from __future__ import annotations

import ctypes
from collections import Counter

import hypothesis.strategies as st
import models_for_tests
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from mpirun.comm.device import Device
from mpirun.comm.ordered_allreduce import numbers
from mpirun.data.microbatches import Microbatches
from mpirun.engine.core.stage import LocalStage, SavedForward
from mpirun.examples import gpt, mlp
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from mpirun.model.dataflow import TensorSpec
from mpirun.model.stage_shape import StageShape, shard_spans
from mpirun.model.trial import Trial

STAGES, SEED = 4, 3
CHAIN = [(), (0,), (1,), (2,)]  # the producers of each stage
TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8))

MODELS = pytest.mark.parametrize("model", [mlp.tiny(STAGES), gpt.tiny(STAGES)], ids=["mlp", "gpt"])
EVERY_STAGE = pytest.mark.parametrize("index", [0, 1, 3])  # 2 is as 1
SHAPES: dict[int, list[StageShape]] = {}  # by model


def shape_of(module: nn.Module, *inputs: Tensor) -> StageShape:
    with torch.no_grad():
        output = module(*inputs)
    return StageShape(
        (TensorSpec(tuple(output.shape), output.dtype),), (), aliased_outputs=(0,) if output is inputs[0] else ()
    )


def owned(module: nn.Module, shape: StageShape, index: int = 0) -> LocalStage:
    return LocalStage(module, index, shape, Device(), owned_shards=(-1,))


def chain_shape(model: Model, index: int) -> StageShape:
    """The shape of a stage of a chain."""
    if id(model) not in SHAPES:
        batch = Microbatches(model.batch, TEXT, 0, 1)(0, 0)
        SHAPES[id(model)] = Trial(model, model.resolved_reads(CHAIN, 1), batch).shapes()
    return SHAPES[id(model)][index]


def stage_of(model: Model, index: int) -> LocalStage:
    return owned(build_stage(model, index, SEED), chain_shape(model, index), index)


def guest_of(model: Model, index: int) -> tuple[LocalStage, Tensor]:
    """A stage whose weights are another rank's, and the memory that they are received in."""
    shape = chain_shape(model, index)
    memory = torch.empty(shape.weight_bytes, dtype=torch.uint8)
    return LocalStage(build_stage(model, index, SEED), index, shape, Device(), memory), memory


def case(model: Model, index: int):
    """An input of one stage, the loss if it is the last, and a gradient of its output."""
    (data,), target, *_ = Microbatches(model.batch, TEXT, SEED, 1)(0, 0)
    with torch.no_grad():
        for i in range(index):
            data = build_stage(model, i, SEED)(data)
    if index == STAGES - 1:
        return data, lambda outputs: model.loss(outputs[0], target), torch.ones(())
    size = chain_shape(model, index).outputs[0].size
    return data, None, torch.randn(size, generator=torch.Generator().manual_seed(1))


def plain(module: nn.Module, x: Tensor, finish, gradient: Tensor):
    """Output, gradient of the input (None if it is not of floats), and of the parameters, by autograd alone."""
    x = x.clone().requires_grad_(x.is_floating_point())
    output = module(x)
    output = finish([output]) if finish else output
    output.backward(gradient)
    return output.detach(), x.grad, [p.grad for p in module.parameters() if p.requires_grad]


def backward(stage: LocalStage, saved: SavedForward, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the inputs, and what a backward adds to those of the parameters."""
    for parameter in stage.parameters:
        parameter.grad = torch.zeros_like(parameter)
    stage.backward(saved, [gradient])
    return saved.take_gradients(), [parameter.grad for parameter in stage.parameters]


def same(tensors: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@MODELS
@EVERY_STAGE
def test_a_stage_computes_what_autograd_does_to_the_bit(model, index):
    """Whether its backward is whole or in halves; it leaves what it is given, and saves nothing without a backward."""
    x, finish, gradient = case(model, index)
    expected, of_input, of_parameters = plain(build_stage(model, index, SEED), x, finish, gradient)
    stage, before, gradient_before = stage_of(model, index), x.clone(), gradient.clone()
    (output,), saved = stage.forward([x], finish, save=True)
    inputs, grads = backward(stage, saved, gradient)
    assert torch.equal(output, expected) and same(grads, of_parameters)
    assert of_input is None or same(inputs, [of_input])
    for parameter in stage.parameters:
        parameter.grad = None
    _, saved = stage.forward([x], finish, save=True)
    half = stage.backward_input(saved, [gradient])
    assert of_input is None or same(saved.take_gradients(), [of_input])
    assert all(parameter.grad is None for parameter in stage.parameters)
    stage.backward_weight(half)
    assert same([parameter.grad for parameter in stage.parameters], of_parameters)
    (output,), saved = stage.forward([x], finish, save=False)
    assert saved is None and torch.equal(output, expected)
    assert torch.equal(x, before) and torch.equal(gradient, gradient_before) and not x.requires_grad


@MODELS
@EVERY_STAGE
def test_a_backward_adds_to_the_gradients_that_are_there(model, index):
    """Each of two, in the same memory, which may be a row of dw."""
    x, finish, gradient = case(model, index)
    _, _, of_parameters = plain(build_stage(model, index, SEED), x, finish, gradient)
    stage = stage_of(model, index)
    row = torch.zeros_like(stage.weights)
    views = stage.views(row)
    for parameter, view in zip(stage.parameters, views, strict=True):
        parameter.grad = view
    for _ in range(2):
        stage.backward(stage.forward([x], finish, save=True)[1], [gradient])
    assert same(views, [2 * grad for grad in of_parameters])
    assert all(parameter.grad is view for parameter, view in zip(stage.parameters, views, strict=True))


@MODELS
@EVERY_STAGE
def test_weights_may_be_away_between_forward_and_backward(model, index):
    x, finish, gradient = case(model, index)
    owner, (guest, memory) = stage_of(model, index), guest_of(model, index)
    _, expected = backward(owner, owner.forward([x], finish, save=True)[1], gradient)

    def fetch() -> None:
        """As MPI does: into the memory, unseen by autograd."""
        ctypes.memmove(memory.data_ptr(), owner.weights.data_ptr(), len(memory))

    fetch()
    (output,), saved = guest.forward([x], finish, save=True)
    assert torch.equal(output, owner.forward([x], finish, save=True)[0][0])
    ctypes.memset(memory.data_ptr(), 255, len(memory))  # other weights are received there
    fetch()
    assert same(backward(guest, saved, gradient)[1], expected)


@pytest.mark.parametrize("save", [False, True])
def test_a_stage_that_begins_in_place_leaves_its_input_as_it_is(save):
    """x may still be in flight to other ranks, or be read by another stage here."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    before = x.clone()
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    stage = owned(module, shape_of(module, x.clone())._replace(overwrites_inputs=True))
    (output,), _ = stage.forward([x], None, save=save)
    assert torch.equal(output, module[1](before.relu()))
    assert torch.equal(x, before)


@settings(deadline=None, derandomize=True, database=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=2), st.sampled_from([torch.bfloat16, torch.float32, torch.float64])
        ),
        max_size=6,
    ),
    shards=st.integers(1, 4),
)
def test_every_parameter_begins_where_kernels_are_the_same_and_none_overlap(kinds, shards):
    """At 64 bytes on a CPU, and at 256 on a GPU, whose allocations begin at 512."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in kinds])
    stage = owned(module, StageShape((TensorSpec((), torch.float32),), ()))
    views = stage.views(stage.weights)
    assert [(list(view.shape), view.dtype) for view in views] == kinds
    assert all(view.data_ptr() % 64 == 0 for view in views if view.numel())
    assert all(view.data_ptr() % 256 == stage.weights.data_ptr() % 256 for view in views if view.numel())
    for k, view in enumerate(views):
        view.reshape(-1).view(torch.uint8).fill_(k + 1)
    assert Counter(stage.weights.tolist()) == Counter(
        {k + 1: view.nbytes for k, view in enumerate(views)} | {0: stage.size - sum(view.nbytes for view in views)}
    )
    for view in views:
        view.fill_(1)
    sums = Counter()  # by type: each type is found in every shard that has numbers of it, and all its numbers are
    for span in shard_spans(stage.size, range(shards)).values():
        for of_type in numbers(stage.weights[span], stage.sections, span.start):
            sums[of_type.dtype] += int(of_type.double().sum())
    assert sums == sum((Counter({view.dtype: view.numel()}) for view in views), Counter())


class Joined(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs)


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize("module", [nn.Flatten(), Joined(), nn.Identity()], ids=["view", "views of parts", "itself"])
def test_gradients_of_inputs_are_not_where_the_next_gradient_is_received(module, split):
    """Though autograd may return views of the output's gradient as they are."""
    inputs = [torch.randn(2, 3, 4) for _ in range(2 if isinstance(module, Joined) else 1)]
    with torch.no_grad():
        output = module(*inputs)
    views = () if isinstance(module, Joined) else (0,)
    stage = owned(module, StageShape((TensorSpec(tuple(output.shape), output.dtype),), (), aliased_outputs=views))
    received = torch.arange(output.numel(), dtype=torch.float32).view_as(output)
    _, saved = stage.forward(inputs, None, save=True)
    stage.backward_input(saved, [received]) if split else stage.backward(saved, [received])
    found = saved.take_gradients()
    wanted = [gradient.clone() for gradient in found]
    received.fill_(-1)
    assert all(map(torch.equal, found, wanted)) and not any((gradient < 0).any() for gradient in found)


class Tied(nn.Module):
    """One matrix, under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.there = nn.Linear(5, 5)
        self.back = nn.Linear(5, 5, bias=False)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.there(x)))


def test_a_parameter_that_is_used_twice():
    x, gradient = torch.linspace(-1, 1, 15).view(3, 5), torch.arange(15.0).view(3, 5)
    _, of_input, of_parameters = plain(Tied(), x, None, gradient)
    stage = owned(Tied(), shape_of(Tied(), x))
    assert stage.names == ["there.weight", "there.bias"]
    assert stage.module.back.weight is stage.module.there.weight
    _, saved = stage.forward([x], None, save=True)
    inputs, grads = backward(stage, saved, gradient)
    assert same(inputs, [of_input]) and same(grads, of_parameters)


def test_a_frozen_parameter_stays_out_of_the_weights():
    module = nn.Linear(2, 3)
    module.weight.requires_grad_(False)
    stage = owned(module, StageShape((1, 3), torch.float32, ()))
    assert stage.names == ["bias"]


def test_an_output_of_another_shape_than_the_first_is_refused():
    stage = owned(nn.Tanh(), StageShape((TensorSpec((2, 3), torch.float32),), ()), 1)
    with pytest.raises(RuntimeError, match=r"stage 1 returned .*\(3, 2\), but on the first microbatch .*\(2, 3\)"):
        stage.forward([torch.zeros(3, 2)], None, save=True)


def test_versions_of_weights_are_parameters_of_one_module_in_turn():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    stage = owned(module, shape_of(module, torch.randn(2, 4)))
    own = module[0].weight
    version = stage.version(torch.zeros_like(stage.weights))
    x, outputs = torch.randn(2, 4), []
    for each in (version, stage, version):
        outputs.append(each.forward([x], None, False)[0][0])
        assert (module[0].weight is own) == (each is stage) and module[1].weight is module[0].weight
    assert version.module is module and not outputs[0].any() and outputs[1].any() and not outputs[2].any()


def test_trained_weights_are_contiguous_as_in_the_one_process_that_verifies():
    """Kernels for weights in channels_last give other bits."""
    module = nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)
    built = [build_stage(Model([make], nn.functional.mse_loss), 0, SEED) for make in (module, lambda: module)]
    stage = owned(built[0], StageShape((), ()))
    assert {weight.stride() for weight in (built[1].weight, stage.module.weight)} == {(27, 9, 3, 1)}


def test_the_weights_of_recurrent_layers_stay_in_the_flat_memory(monkeypatch):
    """On a GPU `to` and many forwards call flatten_parameters, which moves parameters into memory of cuDNN's layout."""

    def move(self: nn.RNNBase) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    stage = stage_of(models_for_tests.lstm(STAGES), 1)
    before = stage.module(torch.ones(2, models_for_tests.WIDTH))
    stage.weights.zero_()
    assert before.any() and not stage.module(torch.ones(2, models_for_tests.WIDTH)).any()
