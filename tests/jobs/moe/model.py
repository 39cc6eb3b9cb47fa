"""Sequences that count upwards, and a language model whose middle layer sends each token to one of four experts."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import TensorDataset

WORDS, LENGTH, WIDTH, EXPERTS = 16, 8, 32, 4


def sequences(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    first, stride = torch.randint(WORDS, (count, 1), generator=draw), torch.randint(1, 4, (count, 1), generator=draw)
    tokens = (first + stride * torch.arange(LENGTH + 1)) % WORDS
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Routed(nn.Module):
    """Each token goes to the expert that the router prefers (Fedus et al. 2021, "Switch Transformers")."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output; by sequence and expert, the share of its tokens, and the router's mean probability."""
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            y[here] = weight[here, None] * expert(x[here])
        return x + y, one_hot(chosen, EXPERTS).float().mean(1), probabilities.mean(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.routed, self.head = Routed(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, shares, probabilities = self.routed(self.mix(self.words(tokens))[0])
        return self.head(x), shares, probabilities
