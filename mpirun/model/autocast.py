"""torch's mixed precision as a context that may be off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """`torch.autocast` to `dtype` on a type of device (cpu, cuda); None: the block computes in its own types."""
    if dtype is None:
        yield
        return
    with torch.autocast(device_type, dtype=dtype):
        yield
