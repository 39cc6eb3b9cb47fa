"""Plain modules as models: traced, cut into stages, and fed from a text. `--model split_models:NAME`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plain_models
import torch
import torch.nn.functional as nnf
from plain_models import LENGTH, WORDS
from torch import Tensor, nn

from mpirun import Model
from mpirun.batches import Minibatch
from mpirun.split import MpirunWarning, split, split_sequential

Make = Callable[
    [Tensor], tuple[Any, Any]
]  # pieces of text, shape (samples, 2 * LENGTH), below WORDS -> (input, target)
SAMPLES = 4
MASK = (torch.arange(LENGTH) < LENGTH - 1).long().repeat(SAMPLES, 1)


def _model(
    module: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    data: Make,
    points: Sequence[str],
    init: Callable[[nn.Module], None] | None,
    stages: int,
    shared: str,
) -> Model:
    def batch(text: Tensor, rng: np.random.Generator) -> tuple[Any, Any]:
        starts = torch.from_numpy(rng.integers(0, len(text) - 2 * LENGTH, SAMPLES))
        return data(text[starts[:, None] + torch.arange(2 * LENGTH)].long() % WORDS)

    torch.manual_seed(0)
    example, _ = data(torch.zeros(SAMPLES, 2 * LENGTH, dtype=torch.long))
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*statistics are those", MpirunWarning)
        where = {"points": points} if len(points) + 1 == stages else {"stages": stages}
        cut = split(module().train(), args, kwargs, shared=shared, init=init, **where)
    return cut.model(loss, batch, 2 * LENGTH)


def named(
    name: str,
    module: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    data: Make,
    points: Sequence[str] = (),
    init: Callable[[nn.Module], None] | None = None,
) -> None:
    """Two functions of this module: `name`, and `name_replicated` whose shared parameters are copies.

    `points`: where four stages begin; otherwise they are found. `init`: of a module on the meta device.
    """
    for suffix, shared in (("", "transmit"), ("_replicated", "replicate")):
        made = functools.partial(_model, module, loss, data, points, init, shared=shared)
        globals()[name + suffix] = functools.cache(lambda stages, made=made: made(stages=stages))


def words(scores: Tensor, target: Tensor) -> Tensor:
    return nnf.cross_entropy(scores.flatten(0, 1), target.flatten())


def tower_loss(output: tuple[Tensor, tuple[Tensor, Tensor]], target: Tensor) -> Tensor:
    return nnf.cross_entropy(output[0], target)


def with_mask(text: Tensor) -> tuple[Any, Any]:
    return {"tokens": text[:, :LENGTH], "mask": MASK}, text[:, 1 : LENGTH + 1]


def pair(text: Tensor) -> tuple[Any, Any]:
    image = text.repeat(1, 12).view(SAMPLES, 3, 8, 8).float() / WORDS
    return {"text": text[:, :LENGTH], "image": image}, torch.arange(SAMPLES)


def image(text: Tensor) -> tuple[Any, Any]:
    return (pair(text)[0]["image"],), text[:, 0] % 5


def scores_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return words(output["scores"], target)


def tied_on_meta() -> nn.Module:
    with torch.device("meta"):
        return plain_models.Tied()


def set_values(module: nn.Module) -> None:
    """Those of a submodule that has none."""
    if isinstance(module, plain_models.GPT2Like):
        module.positions.copy_(torch.arange(LENGTH))
    else:
        module.reset_parameters()


named("gpt2", plain_models.GPT2Like, scores_of, with_mask)
named("tied", plain_models.Tied, scores_of, with_mask)
named("tied_on_meta", tied_on_meta, scores_of, with_mask, init=set_values)
named("resnet", plain_models.ResNetLike, nnf.cross_entropy, image)
named(
    "encoder_decoder",
    plain_models.EncoderDecoder,
    words,
    lambda text: ((text[:, :LENGTH], text[:, LENGTH:]), text[:, LENGTH:].roll(-1, 1)),
    ["encoder.1", "target", "decoder.1"],
)
named("two_tower", plain_models.TwoTower, tower_loss, pair, ["text.1", "image", "project"])


def sequential(stages: int) -> Model:
    """Layers with buffers, and a minibatch whose samples do not divide."""

    def make(text: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - LENGTH, 10))
        pieces = text[starts[:, None] + torch.arange(LENGTH)].long() % WORDS
        return pieces.float() / WORDS, pieces[:, 0]

    torch.manual_seed(0)
    layers = [nn.Linear(LENGTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, WORDS)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*statistics are those", MpirunWarning)
        return split_sequential(nn.Sequential(*layers), stages).model(nnf.cross_entropy, Minibatch(make), LENGTH)


def uneven(stages: int) -> Model:
    """A traced module, and a minibatch whose samples do not divide."""

    def make(text: Tensor, rng: np.random.Generator) -> tuple[Any, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - 2 * LENGTH, 10))
        pieces = text[starts[:, None] + torch.arange(LENGTH + 1)].long() % WORDS
        return {"tokens": pieces[:, :-1], "mask": MASK[:1].repeat(10, 1)}, pieces[:, 1:]

    torch.manual_seed(0)
    example = {"tokens": torch.zeros(3, LENGTH, dtype=torch.long), "mask": MASK[:3]}
    cut = split(plain_models.GPT2Like().train(), (), example, stages=stages, dims=0)
    return cut.model(scores_of, Minibatch(make), 2 * LENGTH)


# Of transformers, from a configuration and with random weights

SIZES = {
    "vocab_size": WORDS, "attn_implementation": "sdpa", "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=4, n_head=2, **SIZES))


def hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**sizes, **SIZES))


def hf_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **SIZES))


def labelled(text: Tensor) -> tuple[Any, Any]:
    before, behind = (part.contiguous() for part in text.split(LENGTH, 1))
    return {"input_ids": before, "attention_mask": MASK, "labels": behind}, behind


for _name, _module in (("gpt2", hf_gpt2), ("bert", hf_bert), ("t5", hf_t5)):
    named(f"transformers_{_name}", _module, lambda output, _: output.loss, labelled)
