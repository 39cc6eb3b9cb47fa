"""A stage on this rank: its module, its weights in one flat tensor, its forward and its backward.

All parameters are views into `weights`, which are bytes, so that they travel as one message, or one message per shard.
Parameters of one type lie together. Every view begins at a multiple of `ALIGN` bytes: the same kernels run on it as on
a tensor that torch allocates, and give the same bits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from mpirun.comm.device import Device
from mpirun.comm.ordered_allreduce import Section
from mpirun.engine.core.split_backward import WeightHalf, input_half, weight_half
from mpirun.model.dataflow import TensorSpec
from mpirun.model.loss import autocast
from mpirun.model.meta_values import like_parameter
from mpirun.model.rng import LayerRng
from mpirun.model.stage_shape import Layout, StageShape, flat_layout, pieces, shard_spans

_ENGINE: Any = torch.autograd.Variable._execution_engine
LossFunction = Callable[[list[Tensor]], Tensor]  # from the last stage's outputs to a number
Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]  # a submodule's parameters, a name, what belongs there
MakeArguments = Callable[[list[Tensor], Sequence[Any]], list[Any]]


class SavedForward(NamedTuple):
    """What a forward keeps for its backward: the autograd graph, not the data of the outputs."""

    inputs: list[Tensor]  # leaves of the graph
    outputs: list[GradientEdge | None]  # None: this output needs no gradient

    def take_gradients(self, wanted: Sequence[bool] | None = None) -> list[Tensor]:
        """Remove and return the gradients of all inputs, or of the wanted ones; zeros where an input has none."""
        gradients = []
        for x in self.inputs if wanted is None else itertools.compress(self.inputs, wanted):
            gradient = x.grad
            gradients.append(torch.zeros_like(x) if gradient is None else gradient.contiguous().resolve_neg())
            x.grad = None  # a graph whose weight gradients are still to come keeps x alive
        return gradients


class LocalStage:
    """A stage that this rank owns or computes, or whose gradient it forwards."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        shape: StageShape,
        device: Device,
        memory: Tensor | None = None,
        autocast_dtype: torch.dtype | None = None,
        shards: Sequence[int] = (-1,),
        owned_shards: Collection[int] = (),
        earlier: Iterable[LocalStage] = (),
        is_given: bool = False,
        call: Callable[..., list[Tensor]] | None = None,
    ) -> None:
        """Move the memory of a module's parameters into flat weights; they stay the objects that they are.

        memory          where weights fetched from other ranks will be, shape (bytes,); None: it fetches none
        autocast_dtype  the type that torch's autocast computes in; None: the parameters' own
        shards           of the weights; (-1,) where they are not divided
        owned_shards     the shards that the rank owns; if it does not own all, they lie outside of `weights`
        earlier         stages of this rank, whose parameters may be some of the module's: it gets others for these
        is_given        the module is a script's, which has its own values of what the rank fetches between two calls
        call            calls the module, whose outputs then may have any shapes; None: it takes the arguments
        """
        self.module, self.index, self.shape, self.device, self.call = module, index, shape, device, call
        self.autocast_dtype = autocast_dtype
        owns_all = len(owned_shards) == len(shards)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self.layout, self.size = flat_layout([parameter for _, parameter in named])
        self.sections = sections(self.layout)
        own = torch.zeros(self.size if owns_all else 0, dtype=torch.uint8, device=device.torch)
        self.weights = own if memory is None else memory
        self.shard_spans = shard_spans(self.size, shards)
        # By shard, the weights that the rank owns.
        self.owned = {shard: self.weights[self.shard_spans[shard]] for shard in shards} if owns_all else {
            shard: self._copy_of_shard(shard, named) for shard in owned_shards
        }  # fmt: skip
        self.owns_separate_shards = not owns_all and bool(self.owned)
        # Parameters that the module gets before a job of this stage, since jobs of others give it their own.
        self.places: list[Place] = []
        # Of those that an earlier stage has, too: where the script has its own, and the weights that follow these.
        self.given: list[Place] = []
        self.twins: list[tuple[Tensor, nn.Parameter]] = []
        self.parameters: list[nn.Parameter] = []
        self.first = [(parameter, parameter.data) for _, parameter in named] if is_given and not owns_all else []
        holders = {id(parameter): stage for stage in earlier for parameter in stage.parameters}
        if owns_all or memory is not None:
            for (_, parameter), view in zip(named, self.views(self.weights), strict=True):
                if owns_all:
                    view.copy_(parameter.detach())
                self.parameters.append(self._own(parameter, view, holders.get(id(parameter))))
        elif self.owns_separate_shards and not is_given:  # it never computes the stage, so the module needs no values
            for _, parameter in named:
                parameter.data = torch.zeros((), dtype=parameter.dtype, device=device.torch).expand(parameter.shape)
        module.to(device.torch)
        self.outside_norm: set[str] = set()  # names of parameters that are an earlier stage's, too, or not stepped
        self.layer_rng = LayerRng(module, shape.model_stage, shape.random_layers, device.seed)

    def _own(self, parameter: nn.Parameter, view: Tensor, holder: LocalStage | None) -> nn.Parameter:
        """The module's parameter with its memory at `view`, or another one there if stage `holder` has it already."""
        if holder is None:
            parameter.data, parameter.grad = view, None
            return parameter
        own = like_parameter(parameter, view)
        holder.places += _places(holder.module, parameter, parameter)
        self.places += _places(self.module, parameter, own)
        self.given += _places(self.module, parameter, parameter)
        self.twins.append((view, parameter))
        return own

    def bind(self) -> None:
        """Give the module this stage's parameters where other stages, or other versions of its weights, have theirs."""
        for parameters, name, parameter in self.places:
            parameters[name] = parameter

    def give_back(self) -> None:
        """Between two calls of a script: the module has the script's parameters."""
        self.bind()
        for parameter, data in self.first:
            parameter.data = data
        for parameters, name, parameter in self.given:
            parameters[name] = parameter
        self.layer_rng.at = ()  # a forward that raised has left it

    def _copy_of_shard(self, shard: int, named: Sequence[tuple[str, nn.Parameter]]) -> Tensor:
        span = self.shard_spans[shard]
        flat = torch.zeros(span.stop - span.start, dtype=torch.uint8, device=self.device.torch)
        for piece in pieces(self.layout, span):
            piece.of_shard(flat).copy_(piece.of_parameter(named[piece.parameter][1].detach()))
        return flat

    def version(self, memory: Tensor) -> LocalStage:
        """The same stage, and module, with a version of its weights in `memory`, shape (bytes,)."""
        stage = copy.copy(self)
        stage.weights = memory
        self.bind()
        self.places = [place for x in self.parameters for place in _places(self.module, x, x)]
        stage.parameters = [
            like_parameter(x, view) for x, view in zip(self.parameters, self.views(memory), strict=True)
        ]
        own = {id(x): new for x, new in zip(self.parameters, stage.parameters, strict=True)}
        stage.places = [(parameters, name, own[id(x)]) for parameters, name, x in self.places]
        return stage

    def elsewhere(self, memory: Tensor | None, shape: StageShape) -> LocalStage:
        """The same stage for microbatches of another shape.

        memory  where weights are fetched to, shape (bytes,), from `use_weights` on; None: they stay where they are
        """
        stage = copy.copy(self)
        stage.shape = shape
        self.layer_rng.add(self.module, shape.model_stage, shape.random_layers)
        if memory is not None:
            stage.weights = memory
        return stage

    def use_weights(self) -> None:
        """Point the module's parameters to `weights`; no graph of the module may be alive."""
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in a flat tensor laid out as `weights` is, in their shapes."""
        return [place.of(flat) for place in self.layout]

    def views_of_shard(self, shard: int, flat: Tensor) -> list[Tensor]:
        """The pieces of parameters in a flat tensor laid out as a shard is; shard -1: as `views`."""
        if shard < 0:
            return self.views(flat)
        return [piece.of_shard(flat) for piece in pieces(self.layout, self.shard_spans[shard])]

    def forward(
        self,
        values: Iterable[Tensor],
        loss: LossFunction | None,
        save: bool,
        arguments: MakeArguments = lambda values, leaves: values,
        leaves: Sequence[Any] = (),
        specs: Sequence[TensorSpec] | None = None,
    ) -> tuple[list[Tensor], SavedForward | None]:
        """The outputs, and what the backward needs if `save`. RuntimeError if an output has another shape or type.

        Without `save`, too, gradients are enabled as around the call, as kernels may depend on them: a forward that is
        redone has the same bits both times. Its graph is dropped at the end.

        values     outputs of other stages
        loss       of the last stage: its value is the only output; None: no loss is computed
        arguments  makes the arguments of the module's forward from the values and `leaves` of the microbatch
        specs      shapes and types of the outputs; None: those of the first microbatch
        """
        specs = specs or self.shape.outputs
        self.bind()
        differentiable = torch.is_grad_enabled()
        inputs = [x.detach().requires_grad_(differentiable and x.is_floating_point()) for x in values]
        given = arguments(inputs, leaves)
        with autocast(self.device.kind, self.autocast_dtype):
            taken = self._taken(given)
            output = self.module(*taken) if self.call is None else self.call(self.module, *taken)
            outputs = [output] if isinstance(output, Tensor) else list(output or ())
            if self.call is None and [(x.shape, x.dtype) for x in outputs] != [(x.shape, x.dtype) for x in specs]:
                made, first = (", ".join(f"{x.dtype} of shape {tuple(x.shape)}" for x in xs) for xs in (outputs, specs))
                raise RuntimeError(f"stage {self.index} returned {made}, but on the first microbatch {first}")
            if self.shape.aliased_outputs or any(x.is_leaf or x._is_view() for x in outputs):  # else in new memory
                self._keep_apart(outputs, given)
            if loss is None:
                outputs = [spec.sent(x) for spec, x in zip(specs, outputs, strict=True)]
            else:
                outputs = [loss(outputs)]
        saved = SavedForward(inputs, [_gradient_edge(x) for x in outputs]) if save else None
        return [x.detach() for x in outputs], saved

    def _taken(self, arguments: list[Any]) -> list[Any]:
        if self.shape.overwrites_inputs:  # other jobs may still read them, and a leaf may not be changed in place
            return [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        if self.autocast_dtype is not None:  # it casts a leaf once for all readers, whose gradients add up in it
            return [x.view_as(x) if isinstance(x, Tensor) else x for x in arguments]
        return arguments

    def _keep_apart(self, outputs: list[Tensor], given: Sequence[Any]) -> None:
        """Copy outputs in the memory of what the forward was given, or of buffers: later jobs write there."""
        own = (self.weights, *self.module.buffers())
        taken = {address(x) for x in (*given, *own) if isinstance(x, Tensor)}
        for index, x in enumerate(outputs):
            if index in self.shape.aliased_outputs or address(x) in taken:
                outputs[index] = x.clone()

    def backward(self, saved: SavedForward, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward: the inputs' gradients go to `saved`, the parameters' are added to their `grad`."""
        roots, root_gradients = _differentiable_outputs(saved, gradients)
        self.bind()  # a checkpoint inside the stage runs its forward again
        if roots:
            # What Tensor.backward calls in the end, without its checks: they take as long as three small kernels. On a
            # CPU the backward runs in this thread, so torch need not pass the caller's context on to another one.
            run = _ENGINE.run_backward if self.device.kind == "cpu" else _engine_run_backward
            run(roots, root_gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
            _keep_out_of(root_gradients, saved.inputs)

    def backward_input(self, saved: SavedForward, gradients: Sequence[Tensor | None]) -> WeightHalf | None:
        """Run the backward's first half: the inputs' gradients go to `saved`; the result is for `backward_weight`."""
        roots, root_gradients = _differentiable_outputs(saved, gradients)
        if not roots:
            return None
        self.bind()
        leaves = [x for x in saved.inputs if x.requires_grad]
        grads, half = input_half(roots, root_gradients, leaves, self.parameters)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        _keep_out_of(root_gradients, leaves)
        return half

    def backward_weight(self, half: WeightHalf | None) -> None:
        """Run the backward's second half: add the parameters' gradients to their `grad`."""
        self.bind()
        if half is not None:
            weight_half(half, self.parameters)


def _places(module: nn.Module, parameter: nn.Parameter, own: nn.Parameter) -> list[Place]:
    """Where a module has a parameter: the submodule's parameters, the name there, and what belongs there instead."""
    return [
        (shard._parameters, name, own)
        for shard in module.modules()
        for name, x in shard._parameters.items()
        if x is parameter
    ]


def address(x: Tensor) -> int:
    """The address of a tensor's storage, which its views share; of a sparse tensor, none."""
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else -1


def _keep_out_of(received: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copy input gradients that lie in memory of the received output gradients, which later messages overwrite.

    Autograd may pass a gradient that it is given, or a view of it, on to an input without a copy.
    """
    taken = {address(x) for x in received}
    for x in inputs:
        if x.grad is not None and address(x.grad) in taken:
            x.grad = x.grad.clone()


def _gradient_edge(x: Tensor) -> GradientEdge | None:
    """Where the backward from an output begins; None: the output needs no gradient."""
    node = x.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a Function's node does not keep its graph alive
        return get_gradient_edge(x) if x.requires_grad else None
    return GradientEdge(node, x.output_nr)


def _differentiable_outputs(
    saved: SavedForward, gradients: Sequence[Tensor | None]
) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    roots, root_gradients = [], []
    for edge, gradient in zip(saved.outputs, gradients, strict=True):
        if edge is not None and gradient is not None:
            roots.append(edge)
            root_gradients.append(gradient)
    return tuple(roots), tuple(root_gradients)


def sections(layout: Layout) -> list[Section]:
    """The sections of flat weights, one for the parameters of each type."""
    found: dict[torch.dtype, Section] = {}
    for place in layout:
        begin = found[place.dtype].begin if place.dtype in found else place.begin
        found[place.dtype] = Section(begin, place.end, place.dtype)
    return list(found.values())
