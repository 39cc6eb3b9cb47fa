"""Noisy pictures of four patterns, and a CNN that tells which it is."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def pictures(count: int, seed: int) -> TensorDataset:
    patterns = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=draw)
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 1, 8, 8, generator=draw), labels)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(64, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.convolutions(images).flatten(1))
