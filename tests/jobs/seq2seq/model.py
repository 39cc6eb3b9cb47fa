"""Sequences of two lengths, and a Transformer that learns to reverse them."""

import torch
from torch import Tensor, nn

WORDS, WIDTH, LENGTHS, BATCH = 16, 32, (6, 10), 8


class Reversed:
    """Pairs of tokens and the same in reverse order; token 0 begins each."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, (count,), generator=draw).tolist()
        self.sources = [torch.randint(1, WORDS, (LENGTHS[k],), generator=draw) for k in lengths]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source = self.sources[index]
        return source, torch.cat([torch.zeros(1, dtype=torch.long), source.flip(0)])


def buckets(data: Reversed) -> list[list[int]]:
    """The indices of full batches of sequences of one length, in a random order."""
    batches = []
    for length in LENGTHS:
        indices = [index for index, source in enumerate(data.sources) if len(source) == length]
        batches += [indices[begin : begin + BATCH] for begin in range(0, len(indices) - BATCH + 1, BATCH)]
    return [batches[k] for k in torch.randperm(len(batches), generator=torch.Generator().manual_seed(0))]


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(max(LENGTHS), WIDTH))
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        x, y = (self.words(tokens) + self.places[: tokens.shape[1]] for tokens in (source, before))
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))
