"""The models of `make bench-run`: a GPT of four blocks, cut into stages as equal as possible.

`--model cases:NAME`: a case, for 1, 2 or 4 stages, or a model in layers, for no more stages than it has layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sizes import BLOCKS, CASES, LAYERED, Case, Layers
from torch import nn

from mpirun import Model, split_layers
from mpirun.examples import gpt
from schedgen.util.errors import UsageError


def model(case: Case, stages: int) -> Model:
    """A GPT whose embedding and head are in the stages of the first and the last block."""
    if BLOCKS % stages:
        raise UsageError(f"its {BLOCKS} blocks do not go into {stages} equal stages")
    layers: list[list[Callable[[], nn.Module]]] = [
        [partial(gpt.Block, case.width, case.heads)] * (BLOCKS // stages) for _ in range(stages)
    ]
    layers[0] = [partial(gpt.Embedding, case.length, case.width), *layers[0]]
    layers[-1] = [*layers[-1], partial(gpt.Head, case.width)]
    text = gpt.gpt(1, BLOCKS, case.width, case.heads, case.length, case.sequences)
    return text._replace(stages=[partial(_stage, tuple(found)) for found in layers])


def _stage(layers: tuple[Callable[[], nn.Module], ...]) -> nn.Module:
    return nn.Sequential(*(layer() for layer in layers))


compute, overhead, d48, d128, d384, gpu, quick = (partial(model, case) for case in CASES.values())


def in_layers(layers: Layers, stages: int) -> Model:
    """A GPT whose layers are spread over stages as evenly as possible; the cuts do not change its parameters."""
    case = layers.case
    parts: list[list[Callable[[], nn.Module]]] = [
        [partial(gpt.Block, case.width, case.heads)] * count for count in layers.blocks
    ]
    parts[0] = [partial(gpt.Embedding, case.length, case.width), *parts[0]]
    parts[-1] = [*parts[-1], partial(gpt.Head, case.width)]
    named = {f"layer{k}": partial(_stage, tuple(part)) for k, part in enumerate(parts)}
    text = gpt.gpt(1, 1, case.width, case.heads, case.length, case.sequences)
    return text._replace(stages=split_layers(named, stages))


uneven, quick_layers = (partial(in_layers, x) for x in LAYERED.values())
