"""The examples that `split` takes, how a loader's samples become inputs of stages, and models without a batch."""

from __future__ import annotations

import re
from collections import UserDict
from typing import Any

import pytest
import torch
from plain_models import LENGTH, WORDS
from split_models import scores_of
from torch import Tensor, nn

from mpirun import Cut, split, split_sequential
from mpirun.model.contract import Pair
from mpirun.model.load_model import load_model
from schedgen.util.errors import UsageError

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)
INPUT: dict[str, Any] = {"tokens": TOKENS, "mask": torch.ones_like(TOKENS)}
X = torch.ones(4, 16)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"scores": self.head(self.words(tokens)) * mask[..., None]}


@pytest.mark.parametrize(
    ("example", "kwargs", "data"),
    [
        (INPUT, None, INPUT),
        (UserDict(INPUT), None, INPUT),  # as transformers' BatchEncoding is
        ((*INPUT.values(),), None, (*INPUT.values(),)),
        (TOKENS, {"mask": INPUT["mask"]}, ((TOKENS,), {"mask": INPUT["mask"]})),
    ],
)
def test_examples(example: Any, kwargs: Any, data: Any) -> None:
    cut = split(Words(), example, kwargs, stages=2)
    assert [leaf.tolist() for leaf in cut.leaves(data)] == [value.tolist() for value in INPUT.values()]


def test_an_example_gives_the_kwargs_once() -> None:
    with pytest.raises(UsageError, match="an example that is a mapping gives the kwargs, and so do example_kwargs"):
        split(Words(), INPUT, INPUT, stages=2)


def pair_of(cut: Cut) -> Pair:
    return cut.model(scores_of).origin.pair


def test_pairs_and_mappings_of_samples() -> None:
    cut = split(Words(), INPUT, stages=2)
    samples = {"labels": TOKENS, **dict(reversed(INPUT.items()))}
    leaves, target = pair_of(cut)(samples)
    assert leaves[0] is TOKENS and leaves[1] is INPUT["mask"] and target is samples
    assert pair_of(cut)([INPUT, X])[1] is X
    listed = split(Words(), (*INPUT.values(),), stages=2)
    leaves, target = pair_of(listed)([[*INPUT.values()], X])  # as a DataLoader collates ((a, b), y)
    assert [*leaves] == [*INPUT.values()] and target is X
    data, target = pair_of(split_sequential(nn.Sequential(nn.Linear(16, 1)), 1))((X, TOKENS))
    assert data is X and target is TOKENS
    for of, collated, why in [
        (cut, {"tokens": TOKENS}, "the batch's inputs are ['tokens'], but those of the example ['mask', 'tokens']"),
        (cut, TOKENS, "items should be pairs (input, target), (input,) or mappings: collated is a Tensor"),
        (listed, samples, "samples are mappings, but the module was traced on positional arguments: split(module, {"),
    ]:
        with pytest.raises(UsageError, match=re.escape(why)):
            pair_of(of)(collated)


def test_models_without_a_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "unfed.py").write_text(
        "import mpirun, torch\n"
        "def model(n): return mpirun.split_sequential(torch.nn.Sequential(*(torch.nn.Linear(4, 4)\n"
        "    for _ in range(4))), n).model(torch.nn.functional.mse_loss)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_model("unfed:model", 2, 0, needs_batch=False).batch is None
    with pytest.raises(
        UsageError, match=r"has no batch, which the command line needs; an Engine gets its data from the script"
    ):
        load_model("unfed:model", 2, 0)
