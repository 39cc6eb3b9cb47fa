"""A list of layers as stages: runs of layers, of lengths as equal as possible."""

from __future__ import annotations

from itertools import pairwise

from mpirun.model.contract import Layers
from mpirun.model.split.linear_partition import even_starts
from schedgen.util.errors import UsageError


def split_layers(layers: Layers, stages: int) -> list[Layers]:
    """`stages` runs of `layers`, as `Model.stages` takes them; the first ones are longer if not all can be equal."""
    if stages > len(layers):
        raise UsageError(f"it has {len(layers)} layers, too few for {stages} stages")
    names = list(layers)
    starts = [*even_starts(len(names), stages), len(names)]
    return [{name: layers[name] for name in names[start:end]} for start, end in pairwise(starts)]
