"""Forwards that leave a module's buffers alone: one that is done again must not update running statistics twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


@contextlib.contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, forwards compute the same, but what they write to buffers is lost: they write to copies."""
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    copies: dict[int, Tensor] = {}  # by id of the buffer: modules may share it
    for part, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None:
                part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)
