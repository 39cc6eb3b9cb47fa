"""Plain modules, what they are fed with, and how stages that are cut out of them are compared with them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import plain_models
import torch
import torch.nn.functional as nnf
import torch.utils._pytree as pytree
from plain_models import LENGTH, WORDS
from torch import Tensor, nn

from mpirun import Cut, Input, Value, split, split_sequential


class Plain(NamedTuple):
    """A plain module as a model."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    data: Callable[[Tensor], tuple[Any, Any]]  # shape (samples, 2 * LENGTH), below WORDS -> (input, target)
    points: Sequence[str] = ()  # where four stages begin; otherwise cuts are found
    init: Callable[[nn.Module], None] | None = None  # of a module on the meta device

    def cut(self, stages: int, shared: str = "transmit") -> Cut:
        """The module in stages, traced on 4 samples; the same values every time."""
        torch.manual_seed(0)
        module, (example, _) = self.make().train(), self.batch(0, 4)
        if isinstance(module, nn.Sequential):
            return split_sequential(module, stages)
        args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
        where = {"points": self.points} if len(self.points) + 1 == stages else {"stages": stages}
        return split(module, args, kwargs, shared=shared, init=self.init, **where)

    def batch(self, number: int, samples: int = 16) -> tuple[Any, Any]:
        """The input and the target of so many samples, drawn by a number."""
        return self.data(torch.randint(WORDS, (samples, 2 * LENGTH), generator=torch.Generator().manual_seed(number)))


def words(scores: Tensor, target: Tensor) -> Tensor:
    return nnf.cross_entropy(scores.flatten(0, 1), target.flatten())


def tower_loss(output: tuple[Tensor, tuple[Tensor, Tensor]], target: Tensor) -> Tensor:
    return nnf.cross_entropy(output[0], target)


def with_mask(text: Tensor) -> tuple[Any, Any]:
    mask = (torch.arange(LENGTH) < LENGTH - 1).long().repeat(len(text), 1)
    return {"tokens": text[:, :LENGTH], "mask": mask}, text[:, 1 : LENGTH + 1]


def pair(text: Tensor) -> tuple[Any, Any]:
    image = text.repeat(1, 12).view(-1, 3, 8, 8).float() / WORDS
    return {"text": text[:, :LENGTH], "image": image}, torch.arange(len(text)) % 4


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


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(LENGTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, WORDS))


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
    return {"input_ids": before, "attention_mask": with_mask(text)[0]["mask"], "labels": behind}, behind


PLAIN = {
    "gpt2": Plain(plain_models.GPT2Like, scores_of, with_mask),
    "tied": Plain(plain_models.Tied, scores_of, with_mask),
    "tied_on_meta": Plain(tied_on_meta, scores_of, with_mask, init=set_values),
    "resnet": Plain(plain_models.ResNetLike, nnf.cross_entropy, image, ["down2", "middle", "up2"]),
    "encoder_decoder": Plain(
        plain_models.EncoderDecoder,
        words,
        lambda text: ((text[:, :LENGTH], text[:, LENGTH:]), text[:, LENGTH:].roll(-1, 1)),
        ["encoder.1", "target", "decoder.1"],
    ),
    "two_tower": Plain(plain_models.TwoTower, tower_loss, pair, ["text.1", "image", "project"]),
    "sequential": Plain(layers, nnf.cross_entropy, lambda text: (text[:, :LENGTH] / WORDS, text[:, 0])),
    "t5": Plain(functools.partial(transformer, "t5"), lambda output, _: output.loss, labelled),
}


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
