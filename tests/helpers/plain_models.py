"""Models written without any thought of stages."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mpirun import pipe_split

WIDTH, WORDS, LENGTH = 16, 32, 8


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    heads = [x.view(*x.shape[:2], 2, -1).transpose(1, 2) for x in (q, k, v)]
    return nnf.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).reshape(q.shape)


class Block(nn.Module):
    """Self-attention, attention to `memory` if it is given, and an MLP."""

    def __init__(self, dropout: float = 0.0, crossed: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH) if crossed else None
        self.kv = nn.Linear(WIDTH, 2 * WIDTH) if crossed else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = attend(*self.qkv(self.norm1(x)).chunk(3, -1), causal=True)
        x = x + self.dropout(y if mask is None else y * mask[..., None])
        if memory is not None and self.q is not None and self.kv is not None:
            x = x + attend(self.q(x), *self.kv(memory).chunk(2, -1))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT2Like(nn.Module):
    """With dropout and a mask that is made of an input and a buffer; `tied` embeddings."""

    positions: Tensor

    def __init__(self, blocks: int = 2, dropout: float = 0.1, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        length = tokens.shape[1]
        kept = (mask * (self.positions[:length] < length - 1)).float()
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask=kept)
        return {"scores": self.head(self.norm(x)), "kept": kept}


class Tied(GPT2Like):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__(blocks, tied=True)


class Convolutions(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        y += self.skip(x)
        return self.relu(y)


class ResNetLike(nn.Module):
    """Residual blocks, and long skip connections as in a U-Net, from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Convolutions(3, 8), Convolutions(8, 8), Convolutions(8, 8)
        self.up2, self.up1 = Convolutions(16, 8), Convolutions(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        full = self.down1(image)
        half = self.down2(nnf.max_pool2d(full, 2))
        x = self.middle(nnf.max_pool2d(half, 2))
        x = self.up2(torch.cat([nnf.interpolate(x, scale_factor=2.0), half], 1))
        x = self.up1(torch.cat([nnf.interpolate(x, scale_factor=2.0), full], 1))
        return self.head(x.mean((2, 3)))


class EncoderDecoder(nn.Module):
    """The encoder's output is read by every block of the decoder. An embedding whose gradient would be sparse."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([Block() for _ in range(blocks)])
        self.decoder = nn.ModuleList([Block(crossed=True) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.target(target)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class TwoTower(nn.Module):
    """Texts and images to vectors that can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.text = nn.ModuleList([Block(), Block()])
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.project = nn.Linear(64, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, text: Tensor, *, image: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = self.words(text)
        for block in self.text:
            x = block(x)
        x = nnf.normalize(x.mean(1), dim=-1)
        y = nnf.normalize(self.project(self.image(image)), dim=-1)
        return self.scale * x @ y.T, (x, y)


class Marked(nn.Module):
    """Its source marks where it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu_()
        pipe_split()
        z = self.second(y)
        pipe_split()
        return self.third(z * y)
