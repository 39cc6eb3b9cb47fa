"""The loss of one microbatch, or of the whole minibatch, as the core calls it.

- The backward of a microbatch's loss starts from the microbatch's share of the minibatch, usually 1 / (microbatches of
  a step), so that the gradients of a step add up to the gradient of the mean loss. With weight versions it starts from
  1, because STEP divides by the number of microbatches in an update.
- A loss of the whole minibatch, such as a contrastive loss, takes the outputs of all microbatches together. The last
  stage's forwards collect them. The last forward computes the loss and its gradient with respect to all outputs, from
  which the backwards start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpirun.data.chunks import one_per_sample
from mpirun.data.microbatches import Microbatch
from mpirun.engine.core.context import Score
from mpirun.engine.core.stage import LocalStage
from mpirun.model.autocast import autocast
from mpirun.model.contract import Model
from mpirun.model.loss import check_real, loss_and_metrics, loss_input
from mpirun.model.rng import LOSS
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op
from schedgen.util.errors import UsageError


def score(function: Callable[[Any, Any], Any], stage: LocalStage, i: Instruction) -> Score:
    """A function that computes the loss of a microbatch and its metrics, after the forward `i` of the last stage."""
    facts, rng = stage.shape.loss, stage.layer_rng
    draws = facts is not None and facts.draws

    def loss_of(batch: Microbatch, metrics: dict[str, Tensor], outputs: list[Tensor]) -> Tensor:
        if draws:
            rng.begin(LOSS)
        loss, returned = loss_and_metrics(function, loss_input(outputs), batch)
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: it depends on no parameter")
        metrics |= returned
        return loss

    return loss_of


def check_minibatch_loss(header: Header, passes: int) -> None:
    """UsageError unless the outputs of all microbatches of a step meet on one rank, in one pass, before any update."""
    if not header.has_flush:
        raise UsageError("the model's loss is of the whole minibatch, and this schedule updates weights before its end")
    if passes > 1:
        raise UsageError(
            "accumulate: the model's loss is of the whole minibatch, so a step is one pass through the list"
        )
    last = header.compute[:, -1]
    if (last != last[0, 0]).any():
        raise UsageError(
            "the model's loss is of the whole minibatch: the last stage must be computed by one worker, as in gpipe"
        )


def check_forwards_first(header: Header, instructions: Sequence[Instruction]) -> None:
    """UsageError if a rank starts a backward of the last stage before all its forwards of that stage are done."""
    last = [i.op for i in instructions if i.stage == header.stages - 1]
    forwards = [number for number, op in enumerate(last) if op == Op.FWD]
    backwards = [number for number, op in enumerate(last) if op in (Op.BWD, Op.BWD_I)]
    if forwards and backwards and forwards[-1] > backwards[0]:
        raise UsageError(
            "the model's loss is of the whole minibatch: the last stage's forwards must all come before its first "
            "backward, as in gpipe"
        )


class MinibatchLoss:
    """A step's loss, computed from the outputs of all its microbatches."""

    def __init__(
        self,
        model: Model,
        count: int,
        device_type: str,
        autocast_dtype: torch.dtype | None,
        seed: Callable[[], None] = lambda: None,
    ) -> None:
        """`count`: microbatches of a step; `device_type`: cpu or cuda, for autocast; `seed`: called before the loss."""
        self.model, self.count, self.device_type, self.autocast_dtype = model, count, device_type, autocast_dtype
        self.seed = seed
        self.collected: dict[int, tuple[list[Tensor], Microbatch]] = {}  # by number: outputs, and all but the input

    def add_outputs(self, mb: int, outputs: Sequence[Tensor], batch: Microbatch) -> dict[int, Tensor]:
        """Collect a microbatch's outputs; with the last of them compute the loss and its gradients.

        Returns the loss by microbatch, the same for all; before the last outputs it is empty. UsageError if the loss is
        not one real number, or has no gradient.
        """
        leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in outputs]
        self.collected[mb] = leaves, batch._replace(leaves=[])
        if len(self.collected) < self.count:
            return {}
        self.seed()
        outputs_of, batches = zip(*(self.collected[number] for number in sorted(self.collected)), strict=True)
        with torch.enable_grad(), autocast(self.device_type, self.autocast_dtype):
            joined = [torch.cat(parts) for parts in zip(*outputs_of, strict=True)]
            loss = self.model.loss(loss_input(joined), self._joined_target(batches))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("the loss should be one number: a loss of the whole minibatch has no metrics beside it")
        check_real(loss, {})
        if not loss.requires_grad:
            raise UsageError("the loss has no gradient: it depends on no parameter")
        loss = loss.reshape(())
        loss.backward()
        return dict.fromkeys(self.collected, loss.detach())

    def _joined_target(self, batches: Sequence[Microbatch]) -> Any:
        """The target of the whole minibatch; a leaf that is not by sample is taken once."""
        _, spec = tree_flatten(batches[0].target, is_leaf=one_per_sample(batches[0].size))
        leaves = zip(*(spec.flatten_up_to(batch.target) for batch in batches), strict=True)
        return tree_unflatten(map(_joined, leaves), spec)

    def take_gradients(self, mb: int) -> list[Tensor | None]:
        """The gradients of a microbatch's outputs; they can be taken once."""
        return [leaf.grad for leaf in self.collected.pop(mb)[0]]


def _joined(parts: Sequence[Any]) -> Any:
    """The parts of a leaf, tensors or lists, joined; of anything else the first."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return type(parts[0])(chain.from_iterable(parts)) if isinstance(parts[0], list | tuple) else parts[0]
