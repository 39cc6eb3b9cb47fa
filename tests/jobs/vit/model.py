"""Noisy pictures of four patterns, and a vision transformer that tells which it is."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, PATCH, CLASSES = 32, 4, 4


def pictures(count: int, seed: int) -> TensorDataset:
    patterns = torch.randn(CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    return TensorDataset(patterns[labels] + torch.randn(count, 1, 16, 16, generator=draw), labels)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.randn(16, WIDTH) / WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.encoder(x).mean(1))
