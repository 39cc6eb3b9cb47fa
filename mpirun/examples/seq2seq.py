"""A byte-level encoder and decoder: an nn.Module written without any thought of stages, split by `mpirun.split`.

`--model mpirun.examples.seq2seq:tiny`. The encoder reads a piece of text, the decoder predicts what follows; every
stage of the decoder reads the encoder's output.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mpirun import Model, split
from mpirun.examples.gpt import VOCABULARY


class Seq2Seq(nn.Module):
    """Two pieces of text, (sequences, length) each -> scores of the second's next bytes, (sequences, length, 256)."""

    mask: Tensor

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        """`layers` of the encoder, and as many of the decoder."""
        super().__init__()
        self.byte, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * length, width)
        encoder = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, batch_first=True, norm_first=True)
        decoder = partial(nn.TransformerDecoderLayer, width, heads, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.ModuleList(encoder() for _ in range(layers))
        self.decoder = nn.ModuleList(decoder() for _ in range(layers))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, before: Tensor, behind: Tensor) -> Tensor:
        """`before` and `behind` are bytes; in the text `behind` follows `before`."""
        length = before.shape[1]
        memory = self.byte(before) + self.place.weight[:length]
        for layer in self.encoder:
            memory = layer(memory)
        x = self.byte(behind) + self.place.weight[length:]
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=self.mask, tgt_is_causal=True)
        return self.score(self.norm(x))


def seq2seq(stages: int, layers: int, width: int, heads: int, length: int, sequences: int) -> Model:
    """A model with `layers` layers on each side; a microbatch is `sequences` pieces of text of `2 * length` bytes."""

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - 2 * length, sequences))
        pieces = text[starts[:, None] + torch.arange(2 * length + 1)].long()
        return (pieces[:, :length], pieces[:, length:-1]), pieces[:, length + 1 :]

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return nnf.cross_entropy(scores.flatten(0, 1), target.flatten())

    example = torch.zeros(sequences, length, dtype=torch.long)
    cut = split(Seq2Seq(layers, width, heads, length), (example, example), stages=stages, shared="replicate")
    return cut.model(loss, batch, 2 * length + 1)


@cache
def tiny(stages: int) -> Model:
    """0.5 million parameters, 256 bytes a microbatch."""
    return seq2seq(stages, layers=4, width=64, heads=4, length=32, sequences=4)
