"""Points of four classes, and perceptrons of any width that tell which class a point has."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def points(count: int, seed: int) -> TensorDataset:
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=draw)
    return TensorDataset(centres[labels] + torch.randn(count, 16, generator=draw), labels)


def perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.0), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )
