"""Layers that couple the samples of a batch."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from mpirun.frontend.errors import note


def batch_coupled(module: nn.Module) -> list[str]:
    """The names of normalisations that train on statistics of the whole batch.

    BatchNorm of any kind, unless it is in eval mode and so uses its running statistics; and
    InstanceNorm that keeps running statistics.
    """
    return [name for name, one in module.named_modules() if isinstance(one, _NormBase) and _couples(one)]


def _couples(one: _NormBase) -> bool:
    if isinstance(one, _InstanceNorm):
        return one.training and one.track_running_stats
    return isinstance(one, _BatchNorm) and (one.training or one.running_mean is None)


def warn(module: nn.Module) -> None:
    """Say what a pipeline makes of such layers."""
    if names := batch_coupled(module):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        note(
            f"{shown}: statistics are those of a microbatch, not of the minibatch, and every worker that runs "
            "the stage's forward updates running statistics of its own, from the microbatches it sees"
        )
