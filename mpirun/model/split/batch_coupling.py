"""Layers that couple the samples of a batch: their statistics are those of a microbatch, not of the minibatch."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from mpirun.model.split.errors import warn_user


def batch_coupled(module: nn.Module) -> list[str]:
    """The names of normalisations that compute, or update, statistics of the whole batch.

    BatchNorm of any kind, unless it is in eval mode and has running statistics; and InstanceNorm
    in train mode that keeps running statistics.
    """
    return [name for name, part in module.named_modules() if isinstance(part, _NormBase) and _couples(part)]


def _couples(norm: _NormBase) -> bool:
    if isinstance(norm, _InstanceNorm):
        return norm.training and norm.track_running_stats
    return isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)


def warn_of_batch_statistics(module: nn.Module) -> None:
    """Warn if a module has layers that couple samples: a pipeline changes their statistics."""
    if names := batch_coupled(module):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        synced = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        warn_user(
            f"{shown}: statistics are those of a microbatch, not of the minibatch, and every worker that runs "
            "the stage's forward updates running statistics of its own, from the microbatches it sees"
            + ("; SyncBatchNorm is BatchNorm here" if synced else "")
        )
