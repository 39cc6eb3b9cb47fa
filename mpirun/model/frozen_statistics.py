"""Buffers that forwards change, such as running statistics: copies of them, and forwards that leave them alone.

A forward that is repeated must not update them twice, and computes with the values that they had the first time.
Numbers that modules with buffers have as attributes, such as a count of calls, are treated in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def frozen_statistics(module: nn.Module, begin: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, forwards compute the same, but what they write to buffers is lost: they write to copies.

    Changes of numbers that a module with buffers has as attributes are lost, too. `begin`: values from `buffer_copies`
    that forwards begin with and write to, in place of copies of the buffers as they are now.
    """
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    numbers = [(part, _numbers(part)) for part, _ in before]
    named = dict(module.named_buffers()) if begin else {}
    copies = {id(named[name]): copy for name, copy in (begin or {}).items()}  # modules may share a buffer
    for part, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None:
                part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)
        for part, attributes in numbers:
            vars(part).update(attributes)


def take_numbers(module: nn.Module, source: nn.Module) -> None:
    """Give a stage's module the numbers that another module of the same stage has as attributes."""
    for part, other in zip(module.modules(), source.modules(), strict=True):
        if part._buffers:
            vars(part).update(_numbers(other))


def _numbers(part: nn.Module) -> dict[str, int | float]:
    return {name: x for name, x in vars(part).items() if isinstance(x, int | float) and name != "training"}


def buffer_copies(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, by name."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
