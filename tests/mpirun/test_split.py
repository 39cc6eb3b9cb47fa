"""Stages that a module is split into compute what it computes, forwards and backwards."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
import torch.utils._pytree as pytree
from plain_models import LENGTH, WIDTH, WORDS, EncoderDecoder, GPT2Like, Marked, ResNetLike, Tied, TwoTower
from torch import Tensor, nn

from mpirun.split import Cut, MpirunWarning, batch_coupled, split, split_sequential
from mpirun.wiring import Input, Value
from schedgen.errors import UsageError

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % WORDS
MASK = torch.ones(2, LENGTH, dtype=torch.long)
MASK[0, 5:] = 0
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def score(output: Any) -> Tensor:
    """A loss that depends on all of an output, and on each part otherwise."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(((leaf.float() ** 2).mean() * (k + 1) + leaf.float().mean() for k, leaf in enumerate(leaves)), X.new_zeros(()))


def train(cut: Cut, data: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output and the gradients by parameter, stage after stage, with nothing between stages but what is sent."""
    stages = copy.deepcopy(cut.stages)  # as mpirun does
    leaves = cut.leaves(data)
    sent: dict[Value, Tensor] = {}
    made: list[tuple[Tensor, ...]] = []
    read: list[list[Tensor]] = []
    for stage, (module, sources) in enumerate(zip(stages, cut.reads, strict=True)):
        read.append([leaves[one.index] if isinstance(one, Input) else sent[one].detach() for one in sources])
        for one in read[-1]:
            one.requires_grad_(one.is_floating_point())
        outputs = module(*(one.clone() for one in read[-1]))
        made.append((outputs,) if isinstance(outputs, Tensor) else outputs)
        sent |= {Value(stage, index): output for index, output in enumerate(made[-1])}
    whole: list[Any] = []

    def loss(output: Any, _: None) -> Tensor:
        whole.append(output)
        return score(output)

    last = made[-1] if len(made[-1]) > 1 else made[-1][0]
    gradients: dict[Value, Tensor] = {}
    made[-1] = (cut.loss(loss)(last, None),)
    gradients[Value(len(stages) - 1, 0)] = torch.ones(())
    for stage in reversed(range(len(stages))):
        graded = [
            (output, gradients[Value(stage, index)])
            for index, output in enumerate(made[stage])
            if output.requires_grad and Value(stage, index) in gradients
        ]
        if graded:
            torch.autograd.backward(*zip(*graded, strict=True))
        for source, one in zip(cut.reads[stage], read[stage], strict=True):
            if isinstance(source, Value) and one.grad is not None:
                gradients[source] = gradients.get(source, 0) + one.grad
    found: dict[str, Tensor] = {}
    tied = {place: places[0] for places in cut.tied for place in places}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                key = tied.get((stage, name), (stage, name))[1]
                found[key] = found.get(key, 0) + parameter.grad
    return whole[0], found


def agree(module: nn.Module, cut: Cut, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
    """The same output and gradients as those of the module."""
    plain, kwargs = copy.deepcopy(module), kwargs or {}
    data = (args, kwargs) if args and kwargs else kwargs or args
    torch.manual_seed(1)
    output, gradients = train(cut, data)
    torch.manual_seed(1)
    expected = plain(*args, **kwargs)
    score(expected).backward()
    assert type(output) is type(expected)
    torch.testing.assert_close(pytree.tree_leaves(output), pytree.tree_leaves(expected))
    wanted = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")


def travels(cut: Cut) -> None:
    """Every value goes from its producer to those who use it, and is used."""
    for stage, (module, sources) in enumerate(zip(cut.stages, cut.reads, strict=True)):
        assert len(set(sources)) == len(sources)
        assert all(isinstance(one, Input) or one.stage < stage for one in sources)
        used = {node for node in module.graph.nodes if node.op == "placeholder" and node.users}  # type: ignore[union-attr]
        assert len(used) == len(sources)
    sent = {one for sources in cut.reads for one in sources if isinstance(one, Value)}
    for stage, module in enumerate(cut.stages[:-1]):
        output = module.graph.output_node().args[0]  # type: ignore[union-attr, operator]
        count = len(output) if isinstance(output, tuple) else 1
        assert {one for one in sent if one.stage == stage} == {Value(stage, index) for index in range(count)}


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "gpt2": (GPT2Like, (TOKENS, MASK), {}),
    "tied": (Tied, (TOKENS,), {"mask": MASK}),
    "resnet": (ResNetLike, (torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8),), {}),
    "encoder-decoder": (EncoderDecoder, (TOKENS, TOKENS.flip(1)), {}),
    "two-tower": (TwoTower, (TOKENS,), {"image": torch.linspace(-1, 1, 2 * 192).view(2, 3, 8, 8)}),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*statistics are those", MpirunWarning)
        yield


@pytest.mark.parametrize("shared", ["transmit", "replicate"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_traced(name: str, stages: int, shared: str) -> None:
    make, args, kwargs = PLAIN[name]
    module = make()
    cut = split(module, args, kwargs, stages=stages, shared=shared)
    assert len(cut.stages) == stages
    travels(cut)
    agree(module, cut, args, kwargs)
    names = {name for stage in cut.stages for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in module.named_parameters()}


def transformer(name: str, attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS}
    sizes: dict[str, Any] = {"vocab_size": WORDS, "attn_implementation": attention, "use_cache": False}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=4, n_head=2, **sizes)
        return transformers.GPT2LMHeadModel(config), inputs
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, **sizes
        )
        return transformers.BertForMaskedLM(config), inputs
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, **sizes
        )
        return transformers.LlamaForCausalLM(config), inputs
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **sizes
    )
    return transformers.T5ForConditionalGeneration(config), inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shared", ["transmit", "replicate"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama"])
def test_transformers(name: str, attention: str, stages: int, shared: str) -> None:
    module, inputs = transformer(name, attention)
    module.train()
    cut = split(module, (), inputs, stages=stages, shared=shared)
    travels(cut)
    agree(module, cut, (), inputs)
    for value in cut.bytes:  # masks and positions are made where they are used
        output = cut.stages[value.stage].graph.output_node().args[0]  # type: ignore[union-attr, operator]
        assert "mask" not in str(output)
