"""The halves of a backward give the bits of the whole, and compute no node of the path twice."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.parametrizations import weight_norm

from mpirun.engine.core.split_backward import input_half, weight_half


class Scale(torch.autograd.Function):
    """x * scale, which records of each backward whether autograd keeps the graph."""

    kept: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        Scale.kept.append(torch._C._autograd._get_current_graph_task_keep_graph())
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Layer(nn.Module):
    """What the cases have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 6))

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class WithFunction(Layer):
    """A torch.autograd.Function with a parameter."""

    def between(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.scale)


class WithFunctionOfConstant(Layer):
    """A torch.autograd.Function without one."""

    def between(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.scale.detach())


class WithHook(Layer):
    """A hook at a value that a layer reads."""

    def between(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: 3 * gradient)
        return x.tanh()


class WithGroupNorm(Layer):
    """A GroupNorm of a channels_last tensor, of which torch cannot compute the parameters' gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 2)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.view(5, 3, 1, 2).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).reshape(5, 6)


class WithParameterHooks(Layer):
    """Hooks of two parameters: autograd reaches one through a transpose, the other directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: 3 * gradient)
        self.second.bias.register_hook(lambda gradient: 5 * gradient)


class WithWeightNorm(Layer):
    """A weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.second = weight_norm(self.second)


class WithBroadcast(Layer):
    """A parameter that is smaller than what it is added to, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def between(self, x: Tensor) -> Tensor:
        return ((x + self.one) * self.wide).float().tanh()


class Twice(Layer):
    """A parameter used twice, with a hook: the graph cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.register_hook(lambda gradient: 3 * gradient)

    def between(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh() * self.scale


class Beside(Layer):
    """A part of the output that depends on parameters alone is a root beside the path."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), self.scale[:3].expand(5, 3)])


CASES = [
    WithFunction, WithFunctionOfConstant, WithHook, WithGroupNorm, WithParameterHooks,
    WithWeightNorm, WithBroadcast, Twice, Beside,
]  # fmt: skip


def case(kind: type[Layer]):
    """Parameters of a module, its input, which is a leaf, and its output."""
    torch.manual_seed(1)
    module, x = kind(), torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
    return list(module.parameters()), x, module(x)


@pytest.mark.parametrize("kind", CASES)
def test_the_halves_are_the_whole_to_the_bit(kind):
    parameters, x, output = case(kind)
    gradient = torch.linspace(-2, 1, output.numel()).view_as(output)
    output.backward(gradient)
    whole = [x.grad, *(parameter.grad for parameter in parameters)]
    parameters, x, output = case(kind)
    (of_input,), half = input_half([get_gradient_edge(output)], [gradient], [x], parameters)
    assert all(parameter.grad is None for parameter in parameters)
    weight_half(half, parameters)
    for one, other in zip([of_input, *(parameter.grad for parameter in parameters)], whole, strict=True):
        assert one is None if other is None else torch.equal(one, other)


def test_the_second_half_does_not_go_along_the_path():
    parameters, x, output = case(WithFunctionOfConstant)
    _, half = input_half([get_gradient_edge(output)], [torch.ones_like(output)], [x], parameters)
    before = len(Scale.kept)
    weight_half(half, parameters)
    assert len(Scale.kept) == before


def test_a_graph_that_cannot_be_cut_is_run_once_and_not_kept():
    """The backward of a compiled stage overwrites what its forward has saved."""
    parameters, x, output = case(WithFunction)
    before = len(Scale.kept)
    _, half = input_half([get_gradient_edge(output)], [torch.ones_like(output)], [x], parameters)
    weight_half(half, parameters)
    assert Scale.kept[before:] == [False]
