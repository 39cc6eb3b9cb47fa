"""Points on a circle, a generator of points, and a discriminator that tells whether a point is real."""

import torch
from torch import Tensor, nn

NOISE = 4


def circle(count: int) -> Tensor:
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], -1)


def generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
