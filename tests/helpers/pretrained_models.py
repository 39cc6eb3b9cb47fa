"""Models of transformers that begin with the weights in the directory $WEIGHTS. `--model pretrained_models:NAME`."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from mpirun import Model, split
from mpirun.checkpoint.pretrained import Pretrained

WORDS, LENGTH, SAMPLES = 100, 8, 2


@functools.cache
def gpt2(stages: int) -> Model:
    """A GPT-2, made on the meta device."""
    directory = os.environ["WEIGHTS"]
    with torch.device("meta"):
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(directory))

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[Any, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - LENGTH - 1, SAMPLES))
        pieces = text[starts[:, None] + torch.arange(LENGTH + 1)].long() % WORDS
        return {"input_ids": pieces[:, :-1], "use_cache": False}, pieces[:, 1:]

    def loss(output: Any, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    example = {"input_ids": torch.zeros(SAMPLES, LENGTH, dtype=torch.long), "use_cache": False}
    cut = split(net, example, stages=stages)
    return cut.model(loss, batch, LENGTH + 1, weights=Pretrained(directory))
