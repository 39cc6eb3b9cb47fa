"""The trial of all stages, which finds what every rank knows of them: shapes and types, what forwards change and draw.

Rank 0 runs all stages once on fake tensors, which have shapes but no data and need little memory. They are on the run's
device, because autocast has another list of operations for GPUs than for CPUs. If that fails, as when a stage asks for
values to route tokens to experts, rank 0 runs the stages up to it on the microbatch itself, one after the other.
Such a stage depends on values, and may change its buffers in other microbatches only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpirun.data.microbatches import Microbatch
from mpirun.model.contract import Model
from mpirun.model.dataflow import Input, Reads, Source, TensorSpec, Value, all_outputs, spec_of
from mpirun.model.loss import autocast
from mpirun.model.parallel_layers import sliced_dims
from mpirun.model.rng import layers_of
from mpirun.model.stage_copies import fake_mode, stage_apart, stage_without_values
from mpirun.model.stage_shape import StageShape, flat_layout
from schedgen.util.errors import UsageError, raised, raised_at

BATCH_NORM_WRITES = frozenset({"running_mean", "running_var"})  # written in training, whatever the schema says


def memory(x: Tensor) -> Any:
    """A tensor's storage, or itself if not strided. Views share its `_cdata`, which is unique while it is alive."""
    return x.untyped_storage() if x.layout == torch.strided else x


class ForwardWatch(TorchDispatchMode):
    """While it is active, records the layers that draw, in `random_layers`, and the memory written to, in `written`.

    Only writes by torch operations are seen, not those through NumPy views.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        """`layers`: names of the module's layers; empty: its `RandomOp`s or, if it has none, the module itself."""
        super().__init__()
        self.module = module
        self.held = [(x, memory(x)) for x in (*module.buffers(), *module.parameters())]  # so that ids stay unique
        self.buffers = _buffers(module)
        self.drawn = False  # by the layer whose forward is running
        self.random_layers: list[str] = []
        self.written: set[int] = set()  # the `_cdata` of memory
        self.layers = layers_of(module, layers)
        for name in self.layers:
            layer = module.get_submodule(name) if name else module
            layer.register_forward_pre_hook(lambda *_: setattr(self, "drawn", False))
            layer.register_forward_hook(lambda *_, name=name: self.random_layers.append(name) if self.drawn else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether it draws, and where it writes."""
        kwargs, written = kwargs or {}, _may_write_to(func)
        if written or torch.Tag.nondeterministic_seeded in func.tags:
            parameters = func._schema.arguments
            values = {parameter.name: parameter.default_value for parameter in parameters}
            values |= {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
            # Attention is tagged as drawing, but draws only with dropout.
            self.drawn |= torch.Tag.nondeterministic_seeded in func.tags and values.get("dropout_p", 1.0) != 0.0
            for name in written if values.get("training", True) else written - BATCH_NORM_WRITES:
                self.written |= {memory(x)._cdata for x in tree_leaves(values[name]) if isinstance(x, Tensor)}
        return func(*args, **kwargs)

    def changed_buffers(self) -> list[str]:
        """The module's buffers that have been changed, replaced, added or removed."""
        before, after = self.buffers, _buffers(self.module)
        return [n for n in {**before, **after} if before.get(n) != after.get(n) or before[n][1] in self.written]


def leaves_of_graph(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose `grad` a backward from these outputs would add to."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node: Any = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return leaves


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """By name of a buffer, its id and its memory's `_cdata`."""
    return {name: (id(x), memory(x)._cdata) for name, x in module.named_buffers()}


@cache
def _may_write_to(operation: Any) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in operation._schema.arguments
        if argument.name in BATCH_NORM_WRITES or (argument.alias_info is not None and argument.alias_info.is_write)
    )


CPU = torch.device("cpu")


@dataclass
class Trial:
    """Runs all stages on one microbatch, one after the other.

    `prepare`: is called with every stage and its module before its forward; None: modules stay in train mode, as built.
    """

    model: Model
    reads: Reads
    batch: Microbatch
    autocast_dtype: torch.dtype | None = None
    device: torch.device = CPU
    prepare: Callable[[int, nn.Module], object] | None = None
    fake: FakeTensorMode = field(default_factory=fake_mode)
    real: list[tuple[Sequence[Tensor], StageShape]] = field(default_factory=list)  # of the first stages, with values

    @mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    def shapes(self) -> list[StageShape]:
        """The shapes of all stages, found by running them on this microbatch.

        UsageError if a stage cannot take what it reads, or does not return what the contract says.
        """
        leaves = len(self.batch.leaves)
        for stage, sources in enumerate(self.reads):
            for source in sources:
                if isinstance(source, Input) and source.leaf >= leaves:
                    raise UsageError(f"stage {stage} reads leaf {source.leaf} of the input, which has {leaves}")
        outputs: list[Sequence[Tensor]] = []
        shapes: list[StageShape] = []
        for stage in range(len(self.model.stages)):
            try:
                made, shape = self._forward(stage, outputs, self.fake)
            except _Failed:
                made, shape = self.with_values(stage)
                made = [self.fake.from_tensor(x) for x in made]
            outputs.append(made)
            shapes.append(shape)
            if (slice := self.model.slice_of(stage)).count > 1:
                _check_slice(slice.index, shapes)
        # What forwards have cached outside of their modules has no values: let torch refuse to compute with it.
        self.fake.allow_non_fake_inputs = False
        return shapes

    def with_values(self, stage: int) -> tuple[Sequence[Tensor], StageShape]:
        """The outputs of a stage, and its shape, when all stages up to it run with real values."""
        while len(self.real) <= stage:
            self.real.append(self._forward(len(self.real), [outputs for outputs, _ in self.real], None))
        return self.real[stage]

    def _forward(
        self, stage: int, outputs: Sequence[Sequence[Tensor]], fake: FakeTensorMode | None
    ) -> tuple[Sequence[Tensor], StageShape]:
        """Run a stage; returns its outputs and its shape. `outputs`: of earlier stages; `fake`: None: with real values.

        It gets copies of leaves of the autograd graph, which it may change in place.
        """
        apart = stage_apart(self.model, stage) if fake is None else stage_without_values(self.model, stage, fake)
        with apart as module:
            trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
            layout, size = flat_layout(list(trained.values()))
            shape = StageShape((), tuple(trained), size, layout=tuple(layout), sliced_dims=sliced_dims(module))
            if self.prepare is not None:
                self.prepare(stage, module)
            with fake or nullcontext(), torch.set_grad_enabled(self.prepare is None):
                return self._watched(module, stage, outputs, fake, shape)

    def _watched(
        self,
        module: nn.Module,
        stage: int,
        outputs: Sequence[Sequence[Tensor]],
        fake: FakeTensorMode | None,
        shape: StageShape,
    ) -> tuple[Sequence[Tensor], StageShape]:
        model, device, entry = self.model, self.device, self.model.stages[stage]
        sources = self.reads[stage]
        if model.reads is None:
            sources = all_outputs(sources, list(map(len, outputs)))
        leaves = [
            _input(_argument(source, outputs, self.batch.leaves, stage), fake, device, isinstance(source, Value))
            for source in sources
        ]
        inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        if device != CPU:
            module.to(device)
        watch = ForwardWatch(module, list(entry) if isinstance(entry, Mapping) else [])
        with autocast(device.type, self.autocast_dtype), watch:
            made = _outputs(partial(model.origin.call, module) if model.origin.call else module, inputs, stage)
        _check_references(stage, made, [*leaves, *module.parameters()])
        changed = tuple(watch.changed_buffers())
        others = (*inputs, *module.parameters(), *module.buffers())
        held = {memory(x)._cdata for x in others if isinstance(x, Tensor)}
        is_whole, last = model.slice_of(stage).count == 1, model.model_stage(len(model.stages) - 1)
        keeps_strides = is_whole and model.model_stage(stage) < last  # slices are summed, the loss takes its own
        return [x.detach() for x in made], shape._replace(
            outputs=tuple(spec_of(x) if keeps_strides else TensorSpec(tuple(x.shape), x.dtype) for x in made),
            overwrites_inputs=any(isinstance(x, Tensor) and memory(x)._cdata in watch.written for x in inputs),
            overwrites_buffers=bool(changed or (fake is None and watch.buffers)),
            changed_buffers=changed,
            aliased_outputs=tuple(index for index, x in enumerate(made) if memory(x)._cdata in held),
            random_layers=tuple(watch.random_layers),
            model_stage=model.model_stage(stage),
        )


class _Failed(UsageError):
    """A stage's forward has failed."""


def _argument(source: Source, outputs: Sequence[Sequence[Tensor]], leaves: Sequence[Any], stage: int) -> Any:
    if isinstance(source, Input):
        return leaves[source.leaf]
    produced = outputs[source.stage]
    if source.output >= len(produced):
        raise UsageError(
            f"stage {stage} reads output {source.output} of stage {source.stage}, which returns {len(produced)}"
        )
    if produced[source.output].is_complex():
        raise UsageError(
            f"stage {stage} reads complex numbers, output {source.output} of stage {source.stage}, which cannot be "
            "sent: cut elsewhere, or return torch.view_as_real of them"
        )
    return produced[source.output]


def _input(x: Any, fake: FakeTensorMode | None, device: torch.device, needs_grad: bool) -> Any:
    """A copy of x that the stage may change: a leaf of the autograd graph, with a gradient in training."""
    if not isinstance(x, Tensor):
        return x
    if fake is not None and not fake.is_our_fake(x):
        x = fake.from_tensor(x)
    needs_grad = needs_grad and torch.is_grad_enabled() and x.is_floating_point()
    return x.detach().to(device).clone().requires_grad_(needs_grad)


def _outputs(module: Callable[..., Any], inputs: Sequence[Any], stage: int) -> Sequence[Tensor]:
    try:
        returned = module(*inputs)
    except (Exception, SystemExit) as error:
        what = f"{raised(error)}{raised_at(error)}"
        if isinstance(error, TypeError) and "required positional argument" in str(error):
            what += "; the second of a pair is the target: without one, give ((a, b), None)"
        raise _Failed(f"stage {stage} fails on the shapes it gets: {what}") from error
    outputs = [returned] if isinstance(returned, Tensor) else returned
    what = f"a {type(returned).__name__}"
    if isinstance(outputs, list | tuple) and outputs:
        wrong = [x for x in outputs if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided]
        if not wrong:
            return outputs
        what += f" with a {getattr(wrong[0], 'layout', type(wrong[0]).__name__)} in it"
    raise UsageError(f"stage {stage} should return a tensor or a tuple of them, not {what}")


def _check_references(stage: int, outputs: Sequence[Tensor], known: Sequence[Any]) -> None:
    """UsageError if outputs depend on a parameter that a lambda, a tuple or a partial refers to: no step changes it."""
    for leaf in leaves_of_graph(outputs):
        if isinstance(leaf, nn.Parameter) and all(leaf is not x for x in known):
            raise UsageError(
                f"stage {stage} reads a trained parameter of shape {tuple(leaf.shape)} by a reference, not as an "
                "attribute: register the parameter in the stage's module, and read it as its attribute in forward"
            )


def _check_slice(index: int, shapes: Sequence[StageShape]) -> None:
    """UsageError if the last of `shapes`, slice `index` of its stage, cannot be a term of a sum over the slices."""
    shape = shapes[-1]
    name = f"stage {shape.model_stage} of the model"
    if shape.random_layers:
        raise UsageError(
            f"{name} has slices, but draws random numbers, as dropout does: put this layer into a whole stage"
        )
    if len(shape.outputs) > 1:
        raise UsageError(f"{name} has slices: it should return one tensor")
    if index and shape.outputs != shapes[-2].outputs:
        (before,), (output,) = shapes[-2].outputs, shape.outputs
        raise UsageError(
            f"slices of {name} are parts of a sum, but one gives "
            f"{before.dtype} of shape {before.size}, another {output.dtype} of shape {output.size}"
        )
