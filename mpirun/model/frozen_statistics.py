"""Buffers that forwards change, such as running statistics: copies of them, and forwards that leave them alone.

A forward that is repeated must not update them twice, and computes with the values that they had the first time.
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
    """Inside, forwards compute the same, but what they write to buffers is lost: they write to copies.

    So are the numbers that a module with buffers counts as attributes. `begin`: in place of copies of what the buffers
    are now, these, as `buffer_copies` has given them by every name; forwards write to them. `begin_counts`: the same of
    the numbers, as `counts` has given them.
    """
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    counts_before = counts(module)
    copies = buffer_copies(module, every_name=True) | dict(begin or {})
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        part._buffers.update({name: copies[prefix + name] for name, x in part._buffers.items() if x is not None})
    set_counts(module, begin_counts or {})
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)
        set_counts(module, counts_before)


def counts(module: nn.Module) -> Counts:
    """The numbers that the parts of a module that have buffers count as attributes."""
    return {
        path: {name: x for name, x in vars(part).items() if isinstance(x, int | float) and name != "training"}
        for path, part in module.named_modules()
        if part._buffers
    }


def set_counts(module: nn.Module, values: Counts) -> None:
    """Give the parts of a module these numbers, which may be those of another module of the same stage."""
    for path, numbers in values.items():
        vars(module.get_submodule(path)).update(numbers)


def buffer_copies(module: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Copies of a module's buffers, by name; `every_name`: one that has several has its copy by each."""
    copies: dict[int, Tensor] = {}
    named = module.named_buffers(remove_duplicate=not every_name)
    return {name: copies.setdefault(id(buffer), buffer.detach().clone()) for name, buffer in named}


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, by name."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
