"""Models of transformers that begin with the weights in the directory $WEIGHTS. `--model pretrained_models:NAME`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer as Tokens
from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from mpirun import Model, split
from mpirun.checkpoint.pretrained import Pretrained

WORDS, LENGTH, SAMPLES = 100, 8, 2


def byte_model(directory: str | os.PathLike[str]) -> None:
    """Write a small GPT-2 and a tokenizer of bytes, as transformers saves them."""
    tokenizer = Tokens(models.BPE({byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=4, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=10**9).save_pretrained(directory)


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
    cut = split(net, example, stages=stages, init=net._init_weights)
    return cut.model(loss, batch, LENGTH + 1, weights=Pretrained(directory))
