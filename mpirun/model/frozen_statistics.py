"""Buffers that forwards change, such as running statistics: copies of them, and forwards that do not change them.

A forward that is repeated must not update buffers twice, and computes with the values that they had the first time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def frozen_statistics(module: nn.Module, begin: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, forwards compute the same, but write to copies of the buffers, which are dropped at the end.

    `begin`: copies that forwards begin with and write to, from `buffer_copies(every_name=True)`; None, empty: copies of
    the buffers as they are.
    """
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    copies = begin or buffer_copies(module, every_name=True)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in part._buffers.items():
            if buffer is not None:
                copy = copies.get(prefix + name)
                part._buffers[name] = buffer.clone() if copy is None else copy
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)


def buffer_copies(module: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Copies of a module's buffers, by name; `every_name`: a buffer with several names has its one copy under each."""
    copies = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    return {name: copies[id(buffer)] for name, buffer in module.named_buffers(remove_duplicate=not every_name)}


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, by name."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
