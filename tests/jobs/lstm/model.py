"""Parallel streams of a periodic text, and an LSTM that predicts the next letter."""

import torch
from torch import Tensor, nn

WORDS, WIDTH, STREAMS, LENGTH = 8, 24, 8, 6


def pieces(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of letters and the letters that follow: row r of a batch goes on where row r of the one before ends."""
    draw = torch.Generator().manual_seed(seed)
    periods = torch.randint(3, 8, (STREAMS, 1), generator=draw)
    text = torch.arange(count * LENGTH + 1) % periods
    return [(text[:, k : k + LENGTH], text[:, k + 1 : k + LENGTH + 1]) for k in range(0, count * LENGTH, LENGTH)]


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, letters: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, state = self.lstm(self.words(letters), state)
        return self.head(x), state
