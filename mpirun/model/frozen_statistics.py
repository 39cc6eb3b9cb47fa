"""Buffers that forwards change, such as running statistics: copies of them, and forwards that do not change them.

A forward that is repeated must not update buffers twice, and computes with the values that they had the first time.
Numbers that modules with buffers have as attributes, such as a count of calls, are treated in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

Counts = Mapping[str, Mapping[str, int | float]]  # by submodule that has buffers, its numbers by attribute


@contextlib.contextmanager
def frozen_statistics(
    module: nn.Module, begin: Mapping[str, Tensor] | None = None, begin_counts: Counts | None = None
) -> Iterator[None]:
    """Inside, forwards compute the same, but write to copies of the buffers, which are dropped at the end.

    Changes of numbers that a module with buffers has as attributes are dropped, too. `begin`: copies that forwards
    begin with and write to, from `buffer_copies(every_name=True)`; None, empty: copies of the buffers as they are.
    `begin_counts`: numbers that forwards begin with, from `counts`.
    """
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    counts_before = counts(module)
    copies = begin or buffer_copies(module, every_name=True)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in part._buffers.items():
            if buffer is not None:
                copy = copies.get(prefix + name)
                part._buffers[name] = buffer.clone() if copy is None else copy
    set_counts(module, begin_counts or {})
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)
        set_counts(module, counts_before)


def counts(module: nn.Module) -> Counts:
    """The numbers that submodules with buffers have as attributes, such as a count of calls, by submodule."""
    return {
        path: {name: x for name, x in vars(part).items() if isinstance(x, int | float) and name != "training"}
        for path, part in module.named_modules()
        if part._buffers
    }


def set_counts(module: nn.Module, values: Counts) -> None:
    """Set these numbers in the submodules; they may come from another module of the same stage."""
    for path, numbers in values.items():
        vars(module.get_submodule(path)).update(numbers)


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
