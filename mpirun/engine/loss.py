"""A loss of the whole minibatch, as a contrastive one: of the outputs of all microbatches together.

The last stage's forwards give their outputs; the last of them computes the
loss and its gradient with respect to each, where the backwards begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from mpirun.data.microbatches import Microbatches, Minibatch, leaf_dims
from mpirun.model.autocast import autocast
from mpirun.model.contract import Model
from mpirun.model.dataflow import Dataflow
from mpirun.model.shapes import loss_input
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op
from schedgen.util.errors import UsageError, raised


def check_whole_loss(header: Header, walks: int) -> None:
    """UsageError where a step's outputs do not come together on one rank."""
    if header.weight_versions.count:
        raise UsageError("the model's loss is of the whole minibatch, and this schedule updates before that is through")
    if header.tensor_parallel.degree > 1:
        raise UsageError("the model's loss is of the whole minibatch, and the schedule has shards of stages")
    if walks > 1:
        raise UsageError("--accumulate: the model's loss is of the whole minibatch, which is a walk through the list")
    last = header.compute[:, -1]
    if (last != last[0, 0]).any():
        raise UsageError("the model's loss is of the whole minibatch: the last stage must be computed by one worker")


def check_order(header: Header, instructions: Sequence[Instruction]) -> None:
    """UsageError where a rank begins the last stage's backwards before its forwards are through."""
    ops = [i.op for i in instructions if i.stage == header.stages - 1 and i.op in (Op.FWD, Op.BWD, Op.BWD_I)]
    if ops != sorted(ops):
        raise UsageError(
            "the model's loss is of the whole minibatch: the last stage's forwards must all come before its first "
            "backward, as in gpipe"
        )


def try_whole_loss(
    model: Model, batches: Microbatches, dataflows: Sequence[Dataflow], mixed: torch.dtype | None
) -> None:
    """UsageError where the loss cannot be computed of what the last stage gives for the microbatches of a step."""
    one = WholeLoss(model, len(dataflows), "cpu", mixed)
    try:
        for mb, of_mb in enumerate(dataflows):
            one.take(mb, [torch.zeros(x.size, dtype=x.dtype) for x in of_mb.outputs[-1]], batches(0, mb).target)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"the loss fails on the shapes it gets: {raised(error)}") from None


class WholeLoss:
    """The loss of a step."""

    def __init__(self, model: Model, count: int, kind: str, mixed: torch.dtype | None) -> None:
        """`count`: microbatches; `kind` of device; `mixed`: the type that autocast computes in."""
        self.model, self.count, self.kind, self.mixed = model, count, kind, mixed
        self.ends: dict[int, tuple[list[Tensor], Any]] = {}
        self.losses: dict[int, Tensor] = {}

    def take(self, mb: int, outputs: Sequence[Tensor], target: Any) -> None:
        """A microbatch's outputs; with the last of them comes the loss, the same for all."""
        self.ends[mb] = [x.detach().requires_grad_(x.is_floating_point()) for x in outputs], target
        if len(self.ends) < self.count:
            return
        leaves, targets = zip(*(self.ends[number] for number in sorted(self.ends)), strict=True)
        with torch.enable_grad(), autocast(self.kind, self.mixed):
            together = [torch.cat(parts) for parts in zip(*leaves, strict=True)]
            loss = self.model.loss(loss_input(together), self._target(targets))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("the loss should be one number")
        if not loss.requires_grad:
            raise UsageError("the loss has no gradient: it depends on no parameter")
        loss = loss.reshape(())
        loss.backward()
        self.losses = dict.fromkeys(self.ends, loss.detach())

    def _target(self, targets: Sequence[Any]) -> Any:
        """Of the whole minibatch; what every microbatch got as it is, once."""
        batch = self.model.batch
        dims = batch.dims if isinstance(batch, Minibatch) else 0
        by_leaf = leaf_dims(targets[0], dims[1] if isinstance(dims, tuple) else dims)
        leaves = zip(*map(tree_leaves, targets), strict=True)
        joined = [
            parts[0] if dim is None else torch.cat(parts, dim) for parts, dim in zip(leaves, by_leaf, strict=True)
        ]
        return tree_unflatten(joined, tree_structure(targets[0]))

    def gradients(self, mb: int) -> list[Tensor | None]:
        """With respect to a microbatch's outputs."""
        return [leaf.grad for leaf in self.ends.pop(mb)[0]]
