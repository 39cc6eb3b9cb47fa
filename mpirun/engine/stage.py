"""One stage on one rank: its module, its weights in one flat tensor, forward and backward.

All parameters are views into `weights`, so that they travel as one message,
or as one a part. Every view begins at a multiple of 64 bytes, as torch's own
tensors do: the same kernels run on them, with the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from mpirun.comm.device import Device
from mpirun.engine.split_backward import WeightHalf, input_half, weight_half
from mpirun.engine.weight_shards import pieces, spans
from mpirun.model.autocast import autocast
from mpirun.model.dataflow import TensorSpec
from mpirun.model.rng import LayerRng
from mpirun.model.shapes import StageShape, flat_layout
from schedgen.util.errors import UsageError

Finish = Callable[[list[Tensor]], Tensor]  # from the last stage's outputs


class Saved(NamedTuple):
    """What a forward keeps for its backward: the autograd graph, not the output's data."""

    inputs: list[Tensor]
    outputs: list[GradientEdge | None]  # None: this output needs no gradient

    def leaves(self) -> list[Tensor]:
        """The inputs that have a gradient."""
        return [x for x in self.inputs if x.requires_grad]

    def gradients(self, wanted: Sequence[bool] | None = None) -> list[Tensor]:
        """Those of all inputs, or the wanted ones, taken off them: zero where there is none."""
        found = []
        for x in self.inputs if wanted is None else itertools.compress(self.inputs, wanted):
            found.append(torch.zeros_like(x) if x.grad is None else x.grad.contiguous())
            x.grad = None  # a graph that is still to give weight gradients keeps x
        return found


class Stage:
    def __init__(
        self,
        module: nn.Module,
        index: int,
        shape: StageShape,
        device: Device,
        owned: bool,
        memory: Tensor | None = None,
        mixed: torch.dtype | None = None,
        parts: Sequence[int] = (-1,),
        mine: Collection[int] = (),
    ) -> None:
        """`owned`: all weights are this rank's own. `memory`: where those of other ranks will be, shape (bytes,).

        mixed  the type that torch's autocast computes in; None: the parameters' own
        parts  of the weights; (-1,) where they are not divided
        mine   the parts that are this rank's own where not all are; they lie apart from `weights`
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
        self.spans = spans(self.size, self.dtype, parts)
        self.own = {k: self.weights[self.spans[k]] for k in parts} if owned else {k: self._part(k, named) for k in mine}
        self.apart = not owned and bool(self.own)
        self.parameters = []
        if owned or memory is not None:  # a rank that only passes on the gradient of a stage has no weights of it
            for view, (_, parameter) in zip(self.views(self.weights), named, strict=True):
                if owned:
                    view.copy_(parameter.detach())
                self.parameters.append(_replace(module, parameter, nn.Parameter(view)))
        elif self.apart:  # nor has one that only owns a part
            for _, parameter in named:
                nothing = torch.zeros((), dtype=self.dtype, device=device.torch).expand(parameter.shape)
                _replace(module, parameter, nn.Parameter(nothing))
        module.to(device.torch)
        self.shared: set[str] = set()  # parameters that are tied to an earlier stage's
        self.layer_rng = LayerRng(module, shape.model_stage, shape.random_layers, device.seed)

    def _part(self, k: int, named: Sequence[tuple[str, nn.Parameter]]) -> Tensor:
        """A part of the weights, in memory of its own."""
        span = self.spans[k]
        part = torch.zeros(span.stop - span.start, dtype=self.dtype, device=self.device.torch)
        for piece in pieces(self.layout, span):
            piece.within(part).copy_(piece.of(named[piece.parameter][1].detach()))
        return part

    def complete(self) -> Callable[[], None]:
        """What puts the rank's own parts beside those that are fetched, unseen by autograd as a message is."""
        pairs = [(self.weights.data[self.spans[k]], part) for k, part in self.own.items()]

        def copy() -> None:
            for place, part in pairs:
                place.copy_(part)

        return copy

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

    def in_part(self, via: int, part: Tensor) -> list[Tensor]:
        """What of the parameters lies in a tensor laid out as a part is (-1: as all weights are)."""
        return self.views(part) if via < 0 else [piece.within(part) for piece in pieces(self.layout, self.spans[via])]

    def forward(
        self,
        values: Iterable[Tensor],
        finish: Finish | None,
        save: bool,
        arguments: Callable[[list[Tensor]], list[Any]] = list,
        like: Sequence[TensorSpec] | None = None,
    ) -> tuple[list[Tensor], Saved | None]:
        """The outputs, run through `finish` (the last stage's loss) if given, and what backward needs if `save`.

        `values`: what other stages gave; `arguments`: those of the module's forward, made from them; `like`: what the
        outputs should be, where that is not `shape.outputs`.
        """
        if not save:
            with torch.no_grad():
                return self._compute(arguments([x.detach() for x in values]), finish, like), None
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in values]
        outputs = self._compute(arguments(leaves), finish, like)
        edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        return [x.detach() for x in outputs], Saved(leaves, edges)

    def _compute(self, given: list[Any], finish: Finish | None, like: Sequence[TensorSpec] | None) -> list[Tensor]:
        if (
            self.shape.overwrites_inputs
        ):  # a stage that begins in place would change what others still read, and a leaf besides
            given = [x.clone() if isinstance(x, Tensor) else x for x in given]
        if self.mixed is not None:
            with autocast(self.device.kind, self.mixed):
                return self._finished(self.module(*given), finish, like or self.shape.outputs)
        return self._finished(self.module(*given), finish, like or self.shape.outputs)

    def _finished(self, output: Any, finish: Finish | None, like: Sequence[TensorSpec]) -> list[Tensor]:
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for found, expected in zip(outputs, like, strict=True):
            if found.shape != expected.size or found.dtype is not expected.dtype:
                raise RuntimeError(
                    f"stage {self.index} returned {found.dtype} of shape {tuple(found.shape)}, "
                    f"but on the first microbatch {expected.dtype} of shape {expected.size}"
                )
        for index in self.shape.aliased_outputs:
            outputs[index] = outputs[index].clone()
        return [x.contiguous() for x in (outputs if finish is None else [finish(outputs)])]

    def backward(self, saved: Saved, gradients: Sequence[Tensor | None]) -> None:
        """From the gradients of the outputs: `saved.gradients()`; those of `parameters` are added to their `grad`."""
        roots, given = _needed(saved, gradients)
        if roots:
            # What Tensor.backward ends in, without its checks: they take as long as three small kernels.
            _engine_run_backward(roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True)

    def backward_input(self, saved: Saved, gradients: Sequence[Tensor | None]) -> WeightHalf | None:
        """From the gradients of the outputs: `saved.gradients()`, and what `backward_weight` goes on with."""
        roots, given = _needed(saved, gradients)
        if not roots:
            return None
        leaves = saved.leaves()
        grads, half = input_half(roots, given, leaves, self.parameters)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        return half

    def backward_weight(self, half: WeightHalf | None) -> Sequence[Tensor | None]:
        """Gradients of `parameters` (None: not used)."""
        return [None] * len(self.parameters) if half is None else weight_half(half, self.parameters)


def _needed(saved: Saved, gradients: Sequence[Tensor | None]) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    """The outputs that need a gradient and have one, and these."""
    pairs = zip(saved.outputs, gradients, strict=True)
    found = [(edge, one) for edge, one in pairs if edge is not None and one is not None]
    return tuple(edge for edge, _ in found), tuple(one for _, one in found)


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Put `new` wherever `module` or a part of it has `old`."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new
    return new
