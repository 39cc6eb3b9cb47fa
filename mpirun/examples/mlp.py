"""An MLP that guesses the next byte from the 16 before it, after Bengio et al. (2003).

`--model mpirun.examples.mlp:tiny`. Its layers are divided among the stages of the schedule as evenly as possible.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mpirun import Model, split_layers

CONTEXT = 16  # bytes


class Embedding(nn.Module):
    """16 bytes to one vector: (samples, 16) -> (samples, width)."""

    def __init__(self, width: int) -> None:
        """`width` is a multiple of 16."""
        super().__init__()
        self.byte = nn.Embedding(256, width // CONTEXT)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: integers below 256."""
        return self.byte(tokens).flatten(1)


class Layer(nn.Module):
    """A hidden layer with a skip connection: (samples, width) -> (samples, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, width)."""
        return x + nnf.gelu(self.linear(self.norm(x)))


def mlp(stages: int, hidden: int, width: int, samples: int) -> Model:
    """An MLP of `hidden` hidden layers on microbatches of `samples` samples."""
    layers: OrderedDict[str, Callable[[], nn.Module]] = OrderedDict(embedding=partial(Embedding, width))
    layers |= {f"layer{i}": partial(Layer, width) for i in range(hidden)}
    layers["score"] = partial(nn.Linear, width, 256)

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - CONTEXT, samples))
        pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return pieces[:, :-1], pieces[:, -1]

    return Model(split_layers(layers, stages), nnf.cross_entropy, batch, CONTEXT + 1)


def tiny(stages: int) -> Model:
    """0.2 million parameters, 64 samples a microbatch; up to 12 stages."""
    return mlp(stages, hidden=10, width=128, samples=64)
