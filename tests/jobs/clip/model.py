"""Pictures with captions, and two towers that give a picture and its caption similar vectors."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

WORDS, LENGTH, PIXELS, WIDTH = 16, 4, 24, 32


def captioned(count: int, seed: int) -> TensorDataset:
    """Each word of a caption adds its own picture."""
    of_word = torch.randn(WORDS, PIXELS, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    captions = torch.randint(WORDS, (count, LENGTH), generator=draw)
    return TensorDataset(of_word[captions].sum(1) + torch.randn(count, PIXELS, generator=draw), captions)


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.words = nn.EmbeddingBag(WORDS, WIDTH)
        self.text = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of the images, times a trained scale, and of the captions."""
        images, captions = self.image(images), self.text(self.words(captions))
        return self.scale.exp() * normalize(images, dim=-1), normalize(captions, dim=-1)
