"""One stage on one rank: its module, its weights in one flat tensor, forward and backward.

All parameters are views into `weights`, so that they travel as one message.
Every view begins at a multiple of 64 bytes, as torch's own tensors do: the
same kernels run on them, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from mpirun.backward import WeightHalf, input_half, weight_half
from mpirun.device import Device, autocast
from mpirun.model import Shape, flat_layout
from mpirun.randomness import Draws
from schedgen.errors import UsageError


class Saved(NamedTuple):
    """What a forward keeps for its backward: the autograd graph, not the output's data."""

    inputs: list[Tensor]
    output: GradientEdge | None  # None: nothing here needs a gradient

    def leaves(self) -> list[Tensor]:
        """The inputs that have a gradient."""
        return [x for x in self.inputs if x.requires_grad]

    def gradients(self) -> list[Tensor]:
        """Those of all inputs, taken off them: zero where there is none."""
        found = []
        for x in self.inputs:
            found.append(torch.zeros_like(x) if x.grad is None else x.grad.contiguous())
            x.grad = None  # a graph that is still to give weight gradients keeps x
        return found


class Stage:
    def __init__(
        self,
        module: nn.Module,
        index: int,
        shape: Shape,
        device: Device,
        owned: bool,
        memory: Tensor | None = None,
        mixed: torch.dtype | None = None,
    ) -> None:
        """`owned`: the weights are this rank's own. `memory`: where those of another rank will be, shape (bytes,).

        `mixed`: the type that torch's autocast computes in; None: the parameters' own.
        """
        self.module, self.index, self.shape, self.device, self.mixed = module, index, shape, device, mixed
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        types = {parameter.dtype for _, parameter in named} or {torch.float32}
        if len(types) > 1:
            raise UsageError(
                f"stage {index}: parameters of one stage must have one type, not {sorted(map(str, types))}"
            )
        self.dtype = types.pop()
        self.layout, self.size = flat_layout([parameter for _, parameter in named], self.dtype)
        self.weights = torch.zeros(self.size if owned else 0, dtype=self.dtype, device=device.torch)
        if memory is not None:
            self.weights = memory.view(self.dtype)
        self.parameters = []
        if owned or memory is not None:  # a rank that only passes on the gradient of a stage has no weights of it
            for view, (_, parameter) in zip(self.views(self.weights), named, strict=True):
                if owned:
                    view.copy_(parameter.detach())
                self.parameters.append(_replace(module, parameter, nn.Parameter(view)))
        module.to(device.torch)
        self.shared: set[str] = set()  # parameters that are tied to an earlier stage's
        self.draws = Draws(module, index if shape.stage < 0 else shape.stage, shape.draws, device.seed)

    def beside(self, module: nn.Module, memory: Tensor) -> Stage:
        """The same stage with other weights, in `memory`, shape (bytes,); what is no parameter they share."""
        one = Stage(module, self.index, self.shape, self.device, False, memory, self.mixed)
        for mine, other in zip(self.module.modules(), module.modules(), strict=True):
            other._buffers.update(mine._buffers)
        one.shared = self.shared
        return one

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a flat tensor laid out as `weights` is."""
        return [flat[start : start + shape.numel()].view(shape) for start, shape in self.layout]

    def forward(
        self, inputs: Iterable[Tensor], finish: Callable[[Tensor], Tensor] | None, save: bool
    ) -> tuple[Tensor, Saved | None]:
        """The output, run through `finish` (the last stage's loss) if given, and what backward needs if `save`."""
        if not save:
            with torch.no_grad():
                return self._compute([x.detach() for x in inputs], finish), None
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        output = self._compute(leaves, finish)
        return output.detach(), Saved(leaves, get_gradient_edge(output) if output.requires_grad else None)

    def _compute(self, leaves: list[Tensor], finish: Callable[[Tensor], Tensor] | None) -> Tensor:
        if (
            self.shape.overwrites
        ):  # a stage that begins in place would change what others still read, and a leaf besides
            leaves = [x.clone() for x in leaves]
        if self.mixed is not None:
            with autocast(self.device.kind, self.mixed):
                return self._finished(self.module(*leaves), finish)
        return self._finished(self.module(*leaves), finish)

    def _finished(self, output: Tensor, finish: Callable[[Tensor], Tensor] | None) -> Tensor:
        if output.shape != self.shape.size or output.dtype is not self.shape.dtype:
            raise RuntimeError(
                f"stage {self.index} returned {output.dtype} of shape {tuple(output.shape)}, "
                f"but on the first microbatch {self.shape.dtype} of shape {self.shape.size}"
            )
        return (output if finish is None else finish(output)).contiguous()

    def backward(self, saved: Saved, gradient: Tensor) -> None:
        """From the gradient of the output: `saved.gradients()`; those of `parameters` are added to their `grad`."""
        if saved.output is not None:
            # What Tensor.backward ends in, without its checks: they take as long as three small kernels.
            _engine_run_backward(
                (saved.output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def backward_input(self, saved: Saved, gradient: Tensor) -> WeightHalf | None:
        """From the gradient of the output: `saved.gradients()`, and what `backward_weight` goes on with."""
        if saved.output is None:
            return None
        leaves = saved.leaves()
        grads, half = input_half(saved.output, gradient, leaves, self.parameters)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        return half

    def backward_weight(self, half: WeightHalf | None) -> Sequence[Tensor | None]:
        """Gradients of `parameters` (None: not used)."""
        return [None] * len(self.parameters) if half is None else weight_half(half, self.parameters)


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Put `new` wherever `module` or a part of it has `old`."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new
    return new
