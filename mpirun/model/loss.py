"""The loss of one microbatch, without its padding, and its metrics; mixed precision, in which it is computed, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from mpirun.data.microbatches import Microbatch, one_per_sample
from schedgen.util.errors import UsageError


def autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """`torch.autocast` to `dtype` on a type of device (cpu, cuda); None: the region computes in the tensors' types."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def of_last_stage(
    function: Callable[[Any, Any], Any], rebuild: Callable[[Any], Any] | None
) -> Callable[[Any, Any], Any]:
    """A loss of the last stage's output, from a loss of the module's own; `rebuild`: as Origin.rebuild."""
    return function if rebuild is None else lambda output, target: function(rebuild(output), target)


def loss_input(outputs: Sequence[Tensor]) -> Any:
    """The last stage's outputs as the loss takes them."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def loss_and_metrics(
    function: Callable[[Any, Any], Any], output: Any, batch: Microbatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and, by name, its metrics, all of shape (). If all is padding, the loss and its gradient are 0.

    `function`: (output, target) -> loss, or (loss, metrics). It gets containers of its own: it may assign to their
    entries, as `target.pop("labels")` does. UsageError if it returns anything else.
    """
    target = batch.target if isinstance(batch.target, Tensor) else tree_map(lambda x: x, batch.target)
    if batch.padding:
        if batch.padding == batch.size:
            # Sums of no elements: 0 times a sum would be NaN if logits are masked.
            nothing = [x.real.flatten()[:0].float().sum() for x in tree_leaves(output) if isinstance(x, Tensor)]
            return torch.stack(nothing).sum(), {}
        output, target = without_padding("output", output, batch), without_padding("target", target, batch)
    returned = function(output, target)
    if isinstance(returned, Tensor) and not returned.dim():
        return returned, {}
    metrics: Mapping[str, Any] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, metrics = returned
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        raise UsageError("the loss should be one number, or a pair of it and a dict of metrics")
    loss = returned.reshape(()) if returned.dim() else returned
    return loss, {name: _metric(name, value, loss) for name, value in metrics.items()} if metrics else {}


def _metric(name: object, value: Any, loss: Tensor) -> Tensor:
    """A metric as a tensor of shape (), where the loss is. UsageError if it is not one number with a name."""
    if isinstance(value, Real):
        value = torch.full((), float(value), dtype=torch.float64, device=loss.device)
    if not isinstance(name, str) or not isinstance(value, Tensor) or value.numel() != 1:
        found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UsageError(f"the metric {name} should be one number, not {found}")
    return value.detach().reshape(())


def without_padding(what: str, tree: Any, batch: Microbatch) -> Any:
    """The tensors of a microbatch, nested as they are, without the samples that are padding.

    Lists and tuples of strings, one for each sample, are cut, too. UsageError if a tensor does not have the
    samples in dimension 0; `what`: output or target.
    """
    if (why := why_uncut(what, tree, batch.size)) is not None:
        raise UsageError(why)
    real = batch.size - batch.padding
    return tree_map(
        lambda x: x[:real] if isinstance(x, Tensor | list | tuple) else x, tree, is_leaf=one_per_sample(batch.size)
    )


def why_uncut(what: str, tree: Any, size: int) -> str | None:
    """A sentence: why padding cannot be removed from these tensors of a microbatch of `size` samples; None: it can.

    Of an output, whose dimensions only the model knows, dimension 0 alone has to be as long as the microbatch.
    """
    for path, x in tree_leaves_with_path(tree):
        if isinstance(x, Tensor) and (x.shape[:1] != (size,) or (what == "output" and size in x.shape[1:])):
            return (
                f"the {what}{keystr(path)} of a microbatch of {size} samples has shape {tuple(x.shape)}, but the last "
                "step of an epoch is padded: give tensors with the samples in dimension 0 alone (expand over them what "
                "is not by sample; compute means over samples in loss=), or the loader another microbatch_size, such "
                'as one that divides the samples, or last="drop"'
            )
    return None
