"""One stage on one rank: its module, its weights in one flat tensor, forward and backward.

All parameters are views into `weights`, so that they travel as one message.
Every view begins at a multiple of 64 bytes, as torch's own tensors do: the
same kernels run on them, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpirun.backward import WeightHalf, input_half, weight_half
from mpirun.model import Shape
from schedgen.errors import UsageError

ALIGN = 64  # bytes


class Saved(NamedTuple):
    """What a forward keeps for its backward: the autograd graph, not the output's data."""

    inputs: list[Tensor]
    output: GradientEdge | None  # None: nothing here needs a gradient

    def leaves(self) -> list[Tensor]:
        """The inputs that have a gradient."""
        return [x for x in self.inputs if x.requires_grad]

    def filled(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients of all inputs from those of `leaves()`: zero where there is none."""
        of_leaf = iter(grads)
        found = [next(of_leaf) if x.requires_grad else None for x in self.inputs]
        pairs = zip(self.inputs, found, strict=True)
        return [torch.zeros_like(x) if grad is None else grad.contiguous() for x, grad in pairs]


class Stage:
    def __init__(self, module: nn.Module, index: int, owned: bool, shape: Shape) -> None:
        self.module, self.index, self.shape = module, index, shape
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        types = {parameter.dtype for _, parameter in named} or {torch.float32}
        if len(types) > 1:
            raise UsageError(
                f"stage {index}: parameters of one stage must have one type, not {sorted(map(str, types))}"
            )
        self.dtype = types.pop()
        self.layout: list[tuple[int, torch.Size]] = []  # where each parameter lies, and its shape
        step = ALIGN // self.dtype.itemsize
        end = 0
        for _, parameter in named:
            self.layout.append((end, parameter.shape))
            end += -(-parameter.numel() // step) * step
        self.size = end
        self.weights = torch.zeros(self.size, dtype=self.dtype)
        self.parameters = []
        for view, (_, parameter) in zip(self.views(self.weights), named, strict=True):
            if owned:
                view.copy_(parameter.detach())
            self.parameters.append(_replace(module, parameter, nn.Parameter(view)))
        if not owned:
            self.release()

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a flat tensor laid out as `weights` is."""
        return [flat[start : start + shape.numel()].view(shape) for start, shape in self.layout]

    def release(self) -> None:
        """Give the weights' memory back; views and saved graphs stay valid for the next `acquire`."""
        self.weights.untyped_storage().resize_(0)

    def acquire(self) -> Tensor:
        """Memory for the weights again, to be filled."""
        self.weights.untyped_storage().resize_(self.size * self.dtype.itemsize)
        return self.weights

    def forward(
        self, inputs: list[Tensor], finish: Callable[[Tensor], Tensor] | None, save: bool
    ) -> tuple[Tensor, Saved | None]:
        """The output, run through `finish` (the last stage's loss) if given, and what backward needs if `save`."""
        leaves = [x.detach().requires_grad_(save and x.is_floating_point()) for x in inputs]
        with torch.set_grad_enabled(save):
            # A stage that begins in place would change what others still read, and a leaf besides.
            output = self.module(*([x.clone() for x in leaves] if self.shape.overwrites else leaves))
            if (tuple(output.shape), output.dtype) != self.shape[:2]:
                raise RuntimeError(
                    f"stage {self.index} returned {output.dtype} of shape {tuple(output.shape)}, "
                    f"but on the first microbatch {self.shape.dtype} of shape {self.shape.size}"
                )
            if finish is not None:
                output = finish(output)
        edge = get_gradient_edge(output) if save and output.requires_grad else None
        return output.detach().contiguous(), Saved(leaves, edge) if save else None

    def backward(self, saved: Saved, gradient: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Gradients of the inputs and of `parameters` (None: not used), from that of the output."""
        leaves = saved.leaves()
        wanted = [*leaves, *self.parameters]
        if saved.output is None or not wanted:
            return saved.filled([None] * len(leaves)), [None] * len(self.parameters)
        grads = torch.autograd.grad([saved.output], wanted, [gradient], allow_unused=True)
        return saved.filled(grads[: len(leaves)]), list(grads[len(leaves) :])

    def backward_input(self, saved: Saved, gradient: Tensor) -> tuple[list[Tensor], WeightHalf | None]:
        """Gradients of the inputs, and what `backward_weight` goes on with."""
        if saved.output is None:
            return saved.filled([None] * len(saved.leaves())), None
        grads, half = input_half(saved.output, gradient, saved.leaves(), self.parameters)
        return saved.filled(grads), half

    def backward_weight(self, half: WeightHalf | None) -> list[Tensor | None]:
        """Gradients of `parameters` (None: not used)."""
        return [None] * len(self.parameters) if half is None else weight_half(half, self.parameters)


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Put `new` wherever `module` or a part of it has `old`."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new
    return new
