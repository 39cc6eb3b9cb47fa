"""What a module is cut into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn

from mpirun.frontend.meta_device import Deferred, Values
from mpirun.model.contract import Model
from mpirun.model.dataflow import Source, Value
from schedgen.util.errors import UsageError

Batch = Callable[[Tensor, np.random.Generator], tuple[Any, Any]]


class Inputs(NamedTuple):
    """The example that a module was traced on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # tensors in both have no data
    fewer: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the same of a microbatch with a sample less

    def leaves(self, data: Any, whole: bool = False) -> tuple[Any, ...]:
        """Those of a microbatch's input: a tuple of args, a dict of kwargs, (args, kwargs) or the one tensor.

        `whole`: it is a minibatch's, whose shapes are other ones.
        """
        if self.args and self.kwargs:
            args, kwargs = data
        elif isinstance(data, Mapping) and not self.args:
            args, kwargs = (), data
        else:
            args, kwargs = data if isinstance(data, tuple) else (data,), {}
        if kwargs.keys() != self.kwargs.keys():
            raise UsageError(f"the batch's inputs are {sorted(kwargs)}, but those of the example {sorted(self.kwargs)}")
        leaves, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in self.kwargs}))
        wanted = pytree.tree_structure((self.args, self.kwargs))
        if structure != wanted:
            raise UsageError(f"the batch's input is nested as {structure}, but that of the example as {wanted}")
        if not whole:
            self.check(leaves)
        return tuple(leaves)

    def check(self, leaves: Sequence[Any]) -> None:
        """UsageError where leaves are no microbatch like the example, or like that with a sample less."""
        if self.fewer is not None and _other(leaves, self.fewer) is None:
            return
        if (wrong := _other(leaves, (self.args, self.kwargs))) is not None:
            shapes = "every microbatch has the example's shapes" + (
                "; split with dims, it may have a sample less" if self.fewer is None else ", or a sample less"
            )
            raise UsageError(f"{wrong}: {shapes}")


class Output(NamedTuple):
    """How the module's own output is made of the last stage's."""

    leaves: list[int | None]  # which output of the last stage each is; None: the constant
    constants: list[Any]
    spec: pytree.TreeSpec

    def rebuild(self, outputs: Tensor | tuple[Tensor, ...]) -> Any:
        several = (outputs,) if isinstance(outputs, Tensor) else outputs
        leaves = [
            constant if index is None else several[index]
            for index, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


class Cut(NamedTuple):
    """Stages, what each reads, and how to feed the first and read the last.

    stages  a module each: forward takes `reads` of it, and returns a tensor or a tuple of tensors. Their
            parameters are the module's own, under its own names.
    reads   by stage: what each argument of its forward is.
    tied    parameters that several stages have copies of, as Model.tied.
    names   what is in each stage.
    inputs  None: the input is a tensor, or a pytree of them in the order of its leaves.
    output  None: the output is the last stage's.
    flops   of each stage's forward, as far as they are known.
    bytes   of each value that is sent, as far as they are known.
    values  where the module is on the meta device: what its stages get theirs from.
    """

    stages: list[nn.Module]
    reads: list[list[Source]]
    tied: list[list[tuple[int, str]]]
    names: list[str]
    inputs: Inputs | None = None
    output: Output | None = None
    flops: tuple[int, ...] = ()
    bytes: Mapping[Value, int] = {}
    values: Values | None = None

    @property
    def edges(self) -> list[tuple[int, int]]:
        """(producer, consumer) of every two stages between which values go."""
        return sorted(
            {
                (source.stage, stage)
                for stage, sources in enumerate(self.reads)
                for source in sources
                if isinstance(source, Value)
            }
        )

    def leaves(self, data: Any, whole: bool = False) -> tuple[Any, ...]:
        """The leaves of the input of a microbatch, or of a `whole` minibatch, which Input counts."""
        return tuple(pytree.tree_leaves(data)) if self.inputs is None else self.inputs.leaves(data, whole)

    def loss(self, function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """A loss on the last stage's outputs, of one that takes the module's own output."""
        if self.output is None:
            return function
        rebuild = self.output.rebuild
        return lambda outputs, target: function(rebuild(outputs), target)

    def model(
        self, loss: Callable[[Any, Any], Tensor], batch: Any, length: int = 1, loss_of: str = "microbatch"
    ) -> Model:
        """For mpirun. `loss` takes the module's own output; the input that `batch` returns is the module's own.

        That is a tuple of args, a dict of kwargs, (args, kwargs) where the example had both, or the one tensor.
        Of a Minibatch, `make` returns so much for all microbatches; its dims are one number, or count leaves.
        """
        whole = hasattr(batch, "make")
        make: Batch = batch.make if whole else batch

        def flat(text: Tensor, rng: np.random.Generator) -> tuple[Any, Any]:
            data, target = make(text, rng)
            return self.leaves(data, whole), target

        return Model(
            stages=[_layers(stage, self.values) for stage in self.stages],
            loss=self.loss(loss),
            batch=batch._replace(make=flat, check=self.inputs and self.inputs.check) if whole else flat,
            length=length,
            tied=self.tied,
            reads=self.reads,
            loss_of=loss_of,
            named=True,
        )

    def summary(self) -> str:
        """Stages, their parameters and flops, and what they send."""
        lines = ["stage  parameters       flops  sends (bytes)              is"]
        for stage, (module, name) in enumerate(zip(self.stages, self.names, strict=True)):
            to: dict[int, int] = {}
            for consumer, sources in enumerate(self.reads):
                for source in sources:
                    if isinstance(source, Value) and source.stage == stage:
                        to[consumer] = to.get(consumer, 0) + self.bytes.get(source, 0)
            sends = ", ".join(f"{size or '?'} to {consumer}" for consumer, size in to.items())
            size = sum(parameter.numel() for parameter in module.parameters())
            flops = self.flops[stage] if self.flops else "?"
            lines.append(f"{stage:5}  {size:10}  {flops:>10}  {sends:25}  {name}".rstrip())
        ties = [" = ".join(f"{name} of stage {stage}" for stage, name in places) for places in self.tied]
        return "\n".join(lines + [f"tied: {tie}" for tie in ties])


class Copied:
    """Builds a layer as a copy of one that is there, tensors and all: not on fake ones."""

    real = True

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.layer)


def _layers(
    stage: nn.Module, values: Values | None
) -> nn.Module | Callable[[], nn.Module] | dict[str, Callable[[], nn.Module]]:
    """A run of a Sequential's children by name: dropout and checkpoints then do not depend on the cut."""
    if type(stage) is not nn.Sequential or len({*map(id, stage)}) < len(stage):
        return stage if values is None else Deferred(stage, values)
    if values is None:
        return {name: Copied(child) for name, child in stage.named_children()}
    return {name: Deferred(child, values._replace(module=child)) for name, child in stage.named_children()}


def _other(leaves: Sequence[Any], example: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    """What is another than in the example."""
    for (path, one), leaf in zip(pytree.tree_leaves_with_path(example), leaves, strict=True):
        if _seen(leaf) != _seen(one):
            name = pytree.keystr(path)[3:]
            return f"input {name} of a microbatch is {_seen(leaf)}, but the module was traced on {_seen(one)}"
    return None


def _seen(leaf: Any) -> str:
    """What of a leaf of the input is part of the traced graph."""
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
