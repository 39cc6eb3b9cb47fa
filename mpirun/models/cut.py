"""Cutting a list of layers into stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from schedgen.errors import UsageError


def cut(layers: Mapping[str, Callable[[], nn.Module]], stages: int) -> list[Callable[[], nn.Module]]:
    """`stages` functions that each build a run of layers; the first ones are longer where they do not divide."""
    if stages > len(layers):
        raise UsageError(f"it has {len(layers)} layers, too few for {stages} stages")
    names = list(layers)
    short, longer = divmod(len(names), stages)
    ends = [short * (s + 1) + min(s + 1, longer) for s in range(stages)]
    return [
        partial(_build, {name: layers[name] for name in names[a:b]}) for a, b in zip([0, *ends], ends, strict=False)
    ]


def _build(layers: Mapping[str, Callable[[], nn.Module]]) -> nn.Module:
    return nn.Sequential(OrderedDict((name, layer()) for name, layer in layers.items()))
