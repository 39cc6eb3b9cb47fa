"""A small decoder, low-rank adapters for its layers, and sequences of several lengths that count upwards."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

WORDS, LENGTH, WIDTH, HEADS = 16, 12, 32, 4


def sequences(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and the tokens that follow, padded to LENGTH: with 0, and with -100, which cross_entropy ignores."""
    draw, pairs = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        first, stride, length = (int(torch.randint(*ends, (), generator=draw)) for ends in ((WORDS,), (1, 4), (4, 13)))
        tokens = (first + stride * torch.arange(length + 1)) % WORDS
        pairs.append((pad(tokens[:-1], (0, LENGTH - length)), pad(tokens[1:], (0, LENGTH - length), value=-100)))
    return pairs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LoRA(nn.Module):
    """A frozen layer, and beside it a trained product of two small matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def add_adapters(net: Decoder) -> None:
    net.requires_grad_(False)
    for block in net.blocks:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
