"""Cutting a list of layers into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from schedgen.util.errors import UsageError

Layers = Mapping[str, Callable[[], nn.Module]]


def cut(layers: Layers, stages: int) -> list[Layers]:
    """`stages` runs of layers, as `Model` takes them; the first ones are longer where they do not divide."""
    if stages > len(layers):
        raise UsageError(f"it has {len(layers)} layers, too few for {stages} stages")
    names = list(layers)
    short, longer = divmod(len(names), stages)
    ends = [short * (s + 1) + min(s + 1, longer) for s in range(stages)]
    return [{name: layers[name] for name in names[a:b]} for a, b in zip([0, *ends], ends, strict=False)]
