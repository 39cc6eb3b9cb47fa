"""A `Cut`: the result of a split, which `model` turns into an `mpirun.Model`.

And a module's own input and output in terms of stages: the leaves that stages read, the outputs of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn

from mpirun.data.microbatches import MakeBatch, input_and_target
from mpirun.model.contract import Model, Origin, StageEntry, Weights
from mpirun.model.dataflow import Source, Value
from mpirun.model.loss import of_last_stage
from mpirun.model.meta_values import MetaModule, MetaStage
from schedgen.util.errors import UsageError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a module's forward


def bucket_sizes(buckets: Iterable[int]) -> tuple[int, ...]:
    """The sizes that are declared as `buckets`; UsageError if they are none."""
    if not isinstance(buckets, Iterable) or any(type(size) is not int or size < 1 for size in buckets):
        raise UsageError(f"buckets should be sizes, whole numbers of at least 1, not {buckets!r}")
    return tuple(buckets)


def of_bucket(call: Call, size: int) -> Call:
    """A call with `size` in place of that of dimension 1, of the first tensor that has one, in all dimensions but 0."""
    sizes = [x.shape[1] for x in pytree.tree_leaves(call) if isinstance(x, Tensor) and x.dim() > 1]
    if not sizes:
        raise UsageError("buckets are sizes of dimension 1 of the input, but no tensor of the example has one")

    def resized(x: Tensor) -> Tensor:
        return x.new_zeros([*x.shape[:1], *(size if length == sizes[0] else length for length in x.shape[1:])])

    return pytree.tree_map_only(Tensor, resized, call)


class Example(NamedTuple):
    """The input that a module was traced on: every microbatch has its nesting, shapes and types."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # tensors in args and kwargs have no data
    buckets: Mapping[int, Example] = {}  # by size, the inputs that it was traced on; a microbatch has the shapes of one

    def leaves(self, data: Any) -> tuple[Any, ...]:
        """The leaves of a microbatch's input: a tuple of args, a dict of kwargs, (args, kwargs) or the one tensor.

        UsageError if it is not like the example.
        A list, to which a DataLoader collates tuples, stands for a tuple of args if there are several.
        """
        if isinstance(data, list) and len(self.args) > 1:
            data = tuple(data)
        if self.args and self.kwargs:
            if not (isinstance(data, list | tuple) and len(data) == 2 and isinstance(data[1], Mapping)):
                raise UsageError("the batch's input should be (args, kwargs), as in the example of split")
            args, kwargs = data
        elif isinstance(data, Mapping) and not self.args:
            args, kwargs = (), data
        else:
            args, kwargs = data if isinstance(data, tuple) else (data,), {}
        if kwargs.keys() != self.kwargs.keys():
            raise UsageError(f"the batch's inputs are {sorted(kwargs)}, but those of the example {sorted(self.kwargs)}")
        leaves, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in self.kwargs}))
        if structure != pytree.tree_structure((self.args, self.kwargs)):
            raise UsageError("the batch's input is not nested as the example of split, with the same keys in one order")

        def wrong(example: Example) -> list[tuple[str, str, str]]:
            expected = zip(pytree.tree_leaves_with_path((example.args, example.kwargs)), leaves, strict=True)
            parts = [(pytree.keystr(path)[3:], _traced_part(leaf), _traced_part(x)) for (path, x), leaf in expected]
            return [part for part in parts if part[1] != part[2]]

        for name, has, traced in min(map(wrong, self.buckets.values() or [self]), key=len):
            one = f", of one of buckets={(*self.buckets,)}" if self.buckets else ""
            raise UsageError(
                f"input {name} of a microbatch is {has}, but the module was traced on {traced}: every microbatch has "
                f"the example's shapes{one}"
            )
        return tuple(leaves)

    def pair(self, collated: Any) -> tuple[tuple[Any, ...], Any]:
        """The leaves of the input, and the target, of collated samples. UsageError if there is no such input.

        A pair is (input, target). Of a mapping, the example's kwargs are the input, and all of it is the target.
        """
        if not isinstance(collated, Mapping):
            data, target = input_and_target(collated)
            return self.leaves(data), target
        if self.args or not self.kwargs:
            raise UsageError(
                "samples are mappings, but the module was traced on positional arguments: "
                "split(module, {name: tensor}) says which entries are its input"
            )
        return self.leaves({name: collated[name] for name in self.kwargs if name in collated}), collated


class ModuleOutput(NamedTuple):
    """How the module's own output is made from the last stage's outputs."""

    leaves: list[int | None]  # which output of the last stage each leaf is; None: a constant
    constants: list[Any]
    spec: pytree.TreeSpec

    def rebuild(self, outputs: Tensor | tuple[Tensor, ...]) -> Any:
        """The module's output, from what the last stage returned."""
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        leaves = [
            constant if index is None else tensors[index]
            for index, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


def _traced_part(leaf: Any) -> str:
    """The part of an input's leaf that the exported graph is made for: all but the elements of tensors."""
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


class Cut(NamedTuple):
    """A module cut into stages: what each stage reads, and how the module's input and output relate to theirs.

    stages      one module each: forward takes its `reads`, and returns a tensor or a tuple of tensors. Their
                parameters are the module's own, under its own names.
    reads       by stage: what each argument of its forward is.
    tied        parameters that several stages have copies of, as Model.tied.
    names       by stage, the submodules in it.
    example     the input that the module was traced on; None: the input is a tensor, or a pytree of them, whose
                leaves the stages read in their order.
    output      None: the module's output is the last stage's.
    flops       by stage, of its forward; empty if they are not known.
    sent_bytes  by value that is sent, as far as they are known.
    meta        if the module is on the meta device: what gives values to its stages.
    join        numbers -> the Cut whose stage k joins the next numbers[k] of these stages; None: as Origin.join.
    origin      the Model's, but for its fields pair, traced, join and rebuild, which `model` sets.
    """

    stages: list[nn.Module]
    reads: list[list[Source]]
    tied: list[list[tuple[int, str]]]
    names: list[str]
    example: Example | None = None
    output: ModuleOutput | None = None
    flops: tuple[int, ...] = ()
    sent_bytes: Mapping[Value, int] = {}
    meta: MetaModule | None = None
    join: Callable[[Sequence[int]], Cut] | None = None
    origin: Origin = Origin(named=True)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """(producer, consumer) of every two stages between which values are sent."""
        return sorted({(value.stage, consumer) for value, consumer in self._values_read()})

    def leaves(self, data: Any) -> tuple[Any, ...]:
        """The leaves of the input of a microbatch, in the order that Input counts."""
        return tuple(pytree.tree_leaves(data)) if self.example is None else self.example.leaves(data)

    def loss(self, function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """A loss of the last stage's outputs, from a loss of the module's own output."""
        return of_last_stage(function, None if self.output is None else self.output.rebuild)

    def model(
        self,
        loss: Callable[[Any, Any], Tensor],
        batch: MakeBatch | None = None,
        length: int = 1,
        loss_of: str = "microbatch",
        weights: Weights | None = None,
    ) -> Model:
        """The `Model`. `loss` takes the module's own output; the input that `batch` returns is the module's own.

        This input is a tuple of args, a dict of kwargs, (args, kwargs) if the example had both, or the one tensor.
        `batch`: None if a script gives the data. `weights` as Model.weights.
        """
        entries, cut_at = self._entries(), self.join

        def join(stages: Sequence[StageEntry], numbers: Sequence[int]) -> Mapping[str, Any]:
            if stages is not entries or cut_at is None:
                raise UsageError(
                    "the schedule joins stages of the model, but the model's stages are no longer those that split made"
                )
            joined = cut_at(numbers)
            return {"stages": joined._entries(), "tied": joined.tied, "reads": joined.reads}

        return Model(
            stages=entries,
            loss=self.loss(loss),
            batch=batch if batch is None else self._batch_of_leaves(batch),
            length=length,
            tied=self.tied,
            reads=self.reads,
            loss_of=loss_of,
            weights=weights,
            origin=self.origin._replace(
                pair=input_and_target if self.example is None else self.example.pair,
                traced=self.example is not None,
                buckets=() if self.example is None else tuple(self.example.buckets),
                join=None if cut_at is None else join,
                rebuild=None if self.output is None else self.output.rebuild,
            ),
        )

    def _entries(self) -> list[StageEntry]:
        return [_entry(stage, self.meta) for stage in self.stages]

    def _batch_of_leaves(self, batch: MakeBatch) -> MakeBatch:
        def make_leaves(text: Tensor, rng: np.random.Generator) -> tuple[Any, Any]:
            data, target = batch(text, rng)
            return self.leaves(data), target

        return make_leaves

    def summary(self) -> str:
        """A table of the stages: parameters, flops, bytes sent to which stages, submodules; then the ties."""
        lines = ["stage  parameters       flops  sends (bytes)              is"]
        sent: list[dict[int, int]] = [{} for _ in self.stages]
        for value, consumer in self._values_read():
            to = sent[value.stage]
            to[consumer] = to.get(consumer, 0) + self.sent_bytes.get(value, 0)
        for stage, (module, name) in enumerate(zip(self.stages, self.names, strict=True)):
            sends = ", ".join(f"{size or '?'} to {consumer}" for consumer, size in sent[stage].items())
            parameters = sum(parameter.numel() for parameter in module.parameters())
            flops = self.flops[stage] if self.flops else "?"
            lines.append(f"{stage:5}  {parameters:10}  {flops:>10}  {sends:25}  {name}".rstrip())
        ties = [" = ".join(f"{name} of stage {stage}" for stage, name in tie) for tie in self.tied]
        return "\n".join(lines + [f"tied: {tie}" for tie in ties])

    def _values_read(self) -> list[tuple[Value, int]]:
        sources = ((source, stage) for stage, sources in enumerate(self.reads) for source in sources)
        return [(source, stage) for source, stage in sources if isinstance(source, Value)]


def _entry(stage: nn.Module, meta: MetaModule | None) -> StageEntry:
    """The stage as `Model.stages` takes it; a run of a Sequential's children by their names.

    Dropout and checkpoints then do not depend on the cut.
    """
    if type(stage) is not nn.Sequential or len({*map(id, stage)}) < len(stage):
        return stage if meta is None else MetaStage(stage, meta)
    return {
        name: child if meta is None else MetaStage(child, MetaModule(child, meta.init))
        for name, child in stage.named_children()
    }
