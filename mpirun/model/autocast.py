"""Mixed precision: the region in which a run with `--autocast` computes its forwards and losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """`torch.autocast` to `dtype` on a type of device (cpu, cuda); None: the region computes in the tensors' types."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)
