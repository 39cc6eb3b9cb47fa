"""A byte-level GPT: embedding, blocks of attention and MLP, head.

`--model mpirun.examples.gpt:tiny`, `:tied` or `:tensor`. Its layers are divided among the stages of the schedule as
evenly as possible.
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
from mpirun.model.parallel_layers import (
    UNSLICED,
    ColumnParallelLinear,
    HeadParallelAttention,
    RowParallelLinear,
    Slice,
    skip,
)

VOCABULARY = 256  # bytes


class Embedding(nn.Module):
    """Bytes and their positions to vectors: (sequences, length) -> (sequences, length, width)."""

    def __init__(self, length: int, width: int, scale: float = 1.0) -> None:
        """`scale`: standard deviation of the vectors of bytes."""
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        nn.init.normal_(self.byte.weight, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: integers below 256, at most `length` per sequence."""
        return self.byte(tokens) + self.place.weight[: tokens.shape[1]]


class AttentionPart(nn.Module):
    """The first half of a block, attention, as a layer that can be a stage with slices by itself; or a slice of it."""

    def __init__(self, width: int, heads: int, slice: Slice = UNSLICED) -> None:
        """`heads` are those of the whole layer."""
        super().__init__()
        self.slice = slice
        self.norm = nn.LayerNorm(width)
        self.attention = HeadParallelAttention(width, heads, slice)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (sequences, length, width)."""
        return skip(x, self.attention(self.norm(x)), self.slice)


class MLPPart(nn.Module):
    """The second half of a block, the MLP, as a layer like `AttentionPart`; or a slice of it."""

    def __init__(self, width: int, slice: Slice = UNSLICED) -> None:
        """`width` is that of x; the whole MLP is 4 times as wide."""
        super().__init__()
        self.slice = slice
        self.norm = nn.LayerNorm(width)
        self.up = ColumnParallelLinear(width, 4 * width, slice)
        self.down = RowParallelLinear(4 * width, width, slice)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (sequences, length, width)."""
        return skip(x, self.down(nnf.gelu(self.up(self.norm(x)))), self.slice)


class Block(nn.Sequential):
    """Causal attention and an MLP, each after a norm and with a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        """`heads` divides `width`; the MLP is 4 times as wide."""
        super().__init__(AttentionPart(width, heads), MLPPart(width))


class Head(nn.Module):
    """Vectors to scores of the next byte: (sequences, length, width) -> (sequences, length, 256)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (sequences, length, width)."""
        return self.score(self.norm(x))


def gpt(
    stages: int, blocks: int, width: int, heads: int, length: int, sequences: int, tied: bool = False,
    halves: bool = False,
) -> Model:  # fmt: skip
    """A GPT of `blocks` blocks on microbatches of `sequences` pieces of text of `length` bytes.

    `tied`: embedding and head share the vectors of bytes. `halves`: attention and MLP of a block are separate layers,
    and a stage that has only one such layer can have slices.
    """
    scale = width**-0.5 if tied else 1.0
    layers: OrderedDict[str, Callable[..., nn.Module]] = OrderedDict(embedding=partial(Embedding, length, width, scale))
    half_blocks: dict[str, Callable[..., nn.Module]] = {}
    for i in range(blocks):
        if halves:
            half_blocks |= {f"attention{i}": partial(AttentionPart, width, heads), f"mlp{i}": partial(MLPPart, width)}
        else:
            layers[f"block{i}"] = partial(Block, width, heads)
    layers |= {**half_blocks, "head": partial(Head, width)}

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - length, sequences))
        pieces = text[starts[:, None] + torch.arange(length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return nnf.cross_entropy(scores.flatten(0, 1), target.flatten())

    ties = [[(0, "embedding.byte.weight"), (stages - 1, "head.score.weight")]] if tied else []
    entries = split_layers(layers, stages)
    sliced = [stage for stage, entry in enumerate(entries) if len(entry) == 1 and half_blocks.keys() >= entry.keys()]
    return Model(entries, loss, batch, length + 1, ties, sliced=sliced)


def tiny(stages: int) -> Model:
    """0.4 million parameters, 256 bytes a microbatch; up to 10 stages."""
    return gpt(stages, blocks=8, width=64, heads=4, length=64, sequences=4)


def tied(stages: int) -> Model:
    """Like tiny, but the first and the last stage share the vectors of bytes, so it needs a graph file."""
    return gpt(stages, blocks=8, width=64, heads=4, length=64, sequences=4, tied=True)


def tensor(stages: int) -> Model:
    """0.2 million parameters, 256 bytes a microbatch; 8 stages, of which 1 to 6 can have 2 or 4 slices.

    Compile with --tensor 2, the graph file of 8 stages and, for 4 ranks, --stages 2.
    """
    return gpt(stages, blocks=3, width=64, heads=4, length=64, sequences=4, halves=True)
