"""Plain modules as models: traced, cut into stages, and fed from a text. `--model split_models:NAME`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plain_models
import torch
import torch.nn.functional as nnf
import torch.utils._pytree as pytree
from plain_models import LENGTH, WORDS
from torch import Tensor, nn

from mpirun import Cut, Input, Model, Value, split, split_sequential

Make = Callable[
    [Tensor], tuple[Any, Any]
]  # pieces of text, shape (samples, 2 * LENGTH), below WORDS -> (input, target)
SAMPLES = 4
FIRST: dict[int, list[Tensor]] = {}  # by the id of cached stages
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
    """Define two functions of this module: `name`, and `name_replicated`, whose shared parameters are copies.

    `points`: where four stages begin; otherwise cuts are found. `init`: initializes a module on the meta device.
    """
    for suffix, shared in (("", "transmit"), ("_replicated", "replicate")):
        made = functools.partial(_model, module, loss, data, points, init, shared=shared)
        globals()[name + suffix] = made if init else functools.partial(_with_first_values, functools.cache(made))


def _with_first_values(make: Callable[..., Model], stages: int) -> Model:
    """What `make` made for this number of stages, with the values that it had then: a run trains the module."""
    model = make(stages=stages)
    tensors = [x for stage in model.stages for x in (*stage.parameters(), *stage.buffers())]
    for x, value in zip(
        tensors, FIRST.setdefault(id(model.stages), [x.detach().clone() for x in tensors]), strict=True
    ):
        x.data, x.grad = value.clone(), None
    return model


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
    """Initialize a submodule that has no values yet."""
    if isinstance(module, plain_models.GPT2Like):
        module.positions.copy_(torch.arange(LENGTH))
    else:
        module.reset_parameters()


named("gpt2", plain_models.GPT2Like, scores_of, with_mask)
named("tied", plain_models.Tied, scores_of, with_mask)
named("without_values", tied_on_meta, scores_of, with_mask, init=lambda module: None)
named("tied_on_meta", tied_on_meta, scores_of, with_mask, init=set_values)
named("resnet", plain_models.ResNetLike, nnf.cross_entropy, image, ["down2", "middle", "up2"])
named(
    "encoder_decoder",
    plain_models.EncoderDecoder,
    words,
    lambda text: ((text[:, :LENGTH], text[:, LENGTH:]), text[:, LENGTH:].roll(-1, 1)),
    ["encoder.1", "target", "decoder.1"],
)
named("two_tower", plain_models.TwoTower, tower_loss, pair, ["text.1", "image", "project"])


@functools.cache
def sequential(stages: int) -> Model:
    """Layers with buffers."""

    def make(text: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - LENGTH, 3))
        pieces = text[starts[:, None] + torch.arange(LENGTH)].long() % WORDS
        return pieces.float() / WORDS, pieces[:, 0]

    torch.manual_seed(0)
    layers = [nn.Linear(LENGTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, WORDS)]
    return split_sequential(nn.Sequential(*layers), stages).model(nnf.cross_entropy, make, LENGTH)


def transformer(name: str, attention: str = "sdpa") -> nn.Module:
    """One of transformers', from a configuration and with random weights."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": WORDS, "attn_implementation": attention, "use_cache": False}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    layers = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, **sizes)
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**layers, **sizes))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**layers, **sizes))
    if name == "mixtral":
        experts = {"num_local_experts": 2, "num_key_value_heads": 1, "experts_implementation": "batched_mm"}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**layers, **sizes, **experts))
    sizes |= {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def labelled(text: Tensor) -> tuple[Any, Any]:
    before, behind = (part.contiguous() for part in text.split(LENGTH, 1))
    return {"input_ids": before, "attention_mask": MASK, "labels": behind}, behind


for _name in ("gpt2", "bert", "t5"):
    named(f"transformers_{_name}", functools.partial(transformer, _name), lambda output, _: output.loss, labelled)


def score(output: Any) -> Tensor:
    """A loss that depends on all of an output, and on each part in another way."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(
        ((leaf.float() ** 2).mean() * (k + 1) + leaf.float().mean() for k, leaf in enumerate(leaves)), torch.zeros(())
    )


def sent_by(cut: Cut, leaves: Sequence[Tensor]) -> dict[Any, Tensor]:
    """The leaves of an input and what each stage makes of them."""
    sent: dict[Any, Tensor] = {Input(k): leaf for k, leaf in enumerate(leaves)}
    for stage, (module, sources) in enumerate(zip(cut.stages, cut.reads, strict=True)):
        outputs = module(*(sent[source].clone() for source in sources))
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        sent |= {Value(stage, k): output.contiguous() for k, output in enumerate(outputs)}
    return sent


def train(cut: Cut, data: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Run the stages, connected only by the values they send; return output, gradients by parameter, and buffers."""
    stages = [copy.deepcopy(stage) for stage in cut.stages]  # as mpirun does
    leaves = cut.leaves(data)
    sent: dict[Value, Tensor] = {}
    made: list[tuple[Tensor, ...]] = []
    read: list[list[Tensor]] = []
    for stage, (module, sources) in enumerate(zip(stages, cut.reads, strict=True)):
        read.append([(leaves[source[0]] if isinstance(source, Input) else sent[source]).detach() for source in sources])
        for x in read[-1]:
            x.requires_grad_(x.is_floating_point())
        outputs = module(*(x.clone() for x in read[-1]))
        made.append((outputs,) if isinstance(outputs, Tensor) else outputs)
        sent |= {Value(stage, index): output.contiguous() for index, output in enumerate(made[-1])}
    rebuilt: list[Any] = []

    def loss(output: Any, _: None) -> Tensor:
        rebuilt.append(output)
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
        for source, x in zip(cut.reads[stage], read[stage], strict=True):
            if isinstance(source, Value) and x.grad is not None:
                gradients[source] = gradients.get(source, 0) + x.grad
    gradient_of: dict[str, Tensor] = {}
    tied = {place: places[0] for places in cut.tied for place in places}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                key = tied.get((stage, name), (stage, name))[1]
                gradient_of[key] = gradient_of.get(key, 0) + parameter.grad
    return rebuilt[0], gradient_of, {name: buffer for stage in stages for name, buffer in stage.named_buffers()}


def agree(module: nn.Module, cut: Cut, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
    """Assert that the stages have the output, gradients and buffers of the module."""
    plain, kwargs = copy.deepcopy(module), kwargs or {}
    data = (args, kwargs) if args and kwargs else kwargs or args
    torch.manual_seed(1)
    output, gradients, buffers = train(cut, data)
    torch.manual_seed(1)
    expected = plain(*args, **kwargs)
    score(expected).backward()
    assert type(output) is type(expected)
    torch.testing.assert_close(pytree.tree_leaves(output), pytree.tree_leaves(expected))
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    wanted = {name: gradient.to_dense() for name, gradient in grads.items() if gradient is not None}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")
    for name, buffer in plain.named_buffers():
        if name in buffers:  # a stage has it
            torch.testing.assert_close(buffers[name], buffer, msg=lambda text: f"{name}: {text}")
