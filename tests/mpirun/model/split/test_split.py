"""Stages that a module is split into compute what it computes, forwards and backwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
import untraceable
from examples import further
from plain_models import LENGTH, WIDTH, WORDS, EncoderDecoder, GPT2Like, Marked, ResNetLike, Tied, TwoTower
from split_models import agree, sent_by, transformer
from torch import Tensor, nn

from mpirun import Cut, Input, MpirunWarning, Value, split, split_sequential
from schedgen.util.errors import UsageError

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % WORDS
MASK = torch.ones(2, LENGTH, dtype=torch.long)
MASK[0, 5:] = 0
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def travels(cut: Cut) -> None:
    """Assert that every value goes from its producer straight to its consumers, which use it."""
    for stage, (module, sources) in enumerate(zip(cut.stages, cut.reads, strict=True)):
        assert len(set(sources)) == len(sources)
        assert all(isinstance(source, Input) or source.stage < stage for source in sources)
        used = {node for node in module.graph.nodes if node.op == "placeholder" and node.users}  # type: ignore[union-attr]
        assert len(used) == len(sources)
    sent = {source for sources in cut.reads for source in sources if isinstance(source, Value)}
    for stage, module in enumerate(cut.stages[:-1]):
        output = module.graph.output_node().args[0]  # type: ignore[union-attr, operator]
        count = len(output) if isinstance(output, tuple) else 1
        assert {value for value in sent if value.stage == stage} == {Value(stage, index) for index in range(count)}


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "gpt2": (GPT2Like, (TOKENS, MASK), {}),
    "tied": (Tied, (TOKENS,), {"mask": MASK}),
    "resnet": (ResNetLike, (torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8),), {}),
    "encoder-decoder": (EncoderDecoder, (TOKENS, TOKENS.flip(1)), {}),
    "two-tower": (TwoTower, (TOKENS,), {"image": torch.linspace(-1, 1, 2 * 192).view(2, 3, 8, 8)}),
}


pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize(
    ("name", "stages", "shared"),
    [
        ("tied", 4, "replicate"),
        ("encoder-decoder", 3, "transmit"),
        *further(("gpt2", 1, "transmit"), ("gpt2", 4, "replicate"), ("tied", 3, "transmit"), ("tied", 2, "replicate")),
        *further(("resnet", 4, "replicate"), ("two-tower", 4, "replicate"), ("encoder-decoder", 4, "replicate")),
    ],
)
def test_traced(name: str, stages: int, shared: str) -> None:
    make, args, kwargs = PLAIN[name]
    module = make()
    cut = split(module, args, kwargs, stages=stages, shared=shared)
    assert len(cut.stages) == stages
    travels(cut)
    agree(module, cut, args, kwargs)
    names = {name for stage in cut.stages for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in module.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "attention", "stages", "shared"),
    [
        ("t5", "sdpa", 3, "replicate"),
        *further(("gpt2", "eager", 2, "transmit"), ("bert", "sdpa", 3, "replicate"), ("llama", "sdpa", 3, "replicate")),
    ],
)  # fmt: skip
def test_transformers(name: str, attention: str, stages: int, shared: str) -> None:
    pytest.importorskip("transformers").logging.set_verbosity_error()
    module = transformer(name, attention).train()
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS}
    cut = split(module, (), inputs, stages=stages, shared=shared)
    travels(cut)
    agree(module, cut, (), inputs)
    for value in cut.sent_bytes:  # masks and positions are made where they are used
        output = cut.stages[value.stage].graph.output_node().args[0]  # type: ignore[union-attr, operator]
        assert "mask" not in str(output)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "setting", "value", "why"),
    [
        ("gpt2", "use_cache", True, "a cache cannot be traced: give the example use_cache=False"),
        *further(
            ("mixtral", "_experts_implementation", "grouped_mm", 'set experts_implementation="batched_mm" in its')
        ),
    ],
)
def test_the_settings_that_transformers_need_are_named(name: str, setting: str, value: object, why: str) -> None:
    pytest.importorskip("transformers").logging.set_verbosity_error()
    module = transformer(name)
    split(module, (), {"input_ids": TOKENS}, stages=2)
    setattr(module.config, setting, value)
    with pytest.raises(UsageError, match=why):
        split(module, (), {"input_ids": TOKENS}, stages=2)


def test_a_mask_of_which_torch_asks_whether_it_is_causal_needs_that_said() -> None:
    class Masked(nn.Module):
        def __init__(self, **said: bool) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.layers, self.said = nn.TransformerEncoder(layer, 2), said

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]), **self.said)

    split(Masked(is_causal=True), torch.zeros(2, 8, 16), stages=2)
    with pytest.raises(UsageError, match=r"whether it is causal: say tgt_is_causal=True, or is_causal=True of"):
        split(Masked(), torch.zeros(2, 8, 16), stages=2)


class Regions(untraceable.Layers):
    """Regions inside one another, with random draws of their own; one without inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            w = x.abs()
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                w = nnf.dropout(w, 0.5)
            mask = torch.ones(len(x), 1)
        with torch.no_grad():
            more = torch.ones(len(x), 1, device=x.device)
        return self.second(x * w * mask) + more


class Parts(untraceable.Layers):
    """Stages begin with no part of a result."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
        return self.second(x.float())


class Norm(untraceable.Layers):
    """A region without autocast, in autocast."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
        return self.second(x)


class Four(nn.Module):
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.register_buffer("ema", torch.zeros(WIDTH))


class Fill(Four):
    """Memory that trained values are written to."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(2, *x.shape)
        out[0] = self.layers[0](x)
        out[1] = self.layers[1](x)
        return self.layers[3](self.layers[2](out))


class Inside(Four):
    """Regions without gradients, where a buffer is changed, and of mixed precision."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
            y = x.argmax(-1, keepdim=True)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[2](x)
        return self.layers[3](x.float()) * y


@pytest.mark.parametrize(
    ("make", "numbers"), [(Regions, [1]), (Parts, [2]), (Norm, [2]), (Fill, [2, 3]), (Inside, [2, 3])]
)
def test_stages_compute_what_the_module_does(make: Callable[[], nn.Module], numbers: list[int]) -> None:
    wide = torch.linspace(-1, 1, 8 * WIDTH).view(4, 2 * WIDTH)
    for stages in numbers:
        module = make()
        cut = split(module, X, stages=stages)
        travels(cut)
        with torch.autocast("cpu", torch.bfloat16, enabled=make is Norm):  # as the engine's autocast
            agree(module, cut, (wide[:, :WIDTH],))
        if make is Inside:
            assert any(dict(stage.named_buffers()).get("ema") is module.ema for stage in cut.stages)


# Where it is cut


def test_points() -> None:
    module = GPT2Like(blocks=4)
    cut = split(module, (TOKENS, MASK), points=["blocks.1", "blocks.3"])
    assert [sorted({name[:8] for name, _ in stage.named_parameters()}) for stage in cut.stages] == [
        ["blocks.0", "places.w", "words.we"],
        ["blocks.1", "blocks.2"],
        ["blocks.3", "head.wei", "norm.bia", "norm.wei"],
    ]
    assert cut.edges == [(0, 1), (1, 2)]
    assert cut.sent_bytes == {Value(0, 0): TOKENS.numel() * WIDTH * 4, Value(1, 0): TOKENS.numel() * WIDTH * 4}
    assert cut.reads[1] == [Input(0), Input(1), Value(0, 0)] or cut.reads[1] == [Input(1), Value(0, 0)]
    agree(module, cut, (TOKENS, MASK))


def test_pipe_split_behind_a_change_in_place() -> None:
    module = Marked()
    cut = split(module, X)
    assert cut.edges == [(0, 1), (0, 2), (1, 2)]
    travels(cut)
    agree(module, cut, (X,))


def test_towers_do_not_wait_for_each_other() -> None:
    make, args, kwargs = PLAIN["two-tower"]
    module = make()
    cut = split(module, args, kwargs, points=["text.1", "image", "image.3"])
    assert cut.edges == [(0, 1), (1, 3), (2, 3)]
    assert cut.reads[2] == [Input(1)]
    agree(module, cut, args, kwargs)


def test_random_numbers_are_drawn_once() -> None:
    class Noise(untraceable.Layers):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn_like(x)
            return self.second(self.first(x + noise)) * noise

    module = Noise()
    cut = split(module, X, points=["second"])
    assert len(cut.sent_bytes) == 2
    agree(module, cut, (X,))


def test_frozen_parameters() -> None:
    module = EncoderDecoder(blocks=1)
    module.source.requires_grad_(False)
    module.encoder.requires_grad_(False)
    module.head.weight = module.source.weight
    cut = split(module, (TOKENS, TOKENS), stages=4)
    assert cut.tied == []
    agree(module, cut, (TOKENS, TOKENS))


def test_statistics_of_batches() -> None:
    module = ResNetLike()
    args = PLAIN["resnet"][1]
    cut = split(module, args, stages=3)
    module(*args)
    sent_by(cut, args)
    buffers = {name: buffer for stage in cut.stages for name, buffer in stage.named_buffers()}
    assert buffers.keys() == dict(module.named_buffers()).keys()
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffers[name], buffer)
    with pytest.warns(MpirunWarning, match="eval mode"):
        split(module.eval(), args, stages=2)


def test_summary() -> None:
    text = split(Tied(), (TOKENS, MASK), points=["blocks.1"], shared="replicate").summary()
    assert re.search(r"^    0 +\d+ +\d+  1024 to 1 +words to blocks.0", text, re.M)
    assert "tied: words.weight of stage 0 = words.weight of stage 1" in text


class Waves(nn.Module):
    """Layers that each multiply the spectrum of x by its own complex numbers, and by those that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        own = [torch.randn(WIDTH // 2 + 1, dtype=torch.complex64) for _ in self.layers]
        self.own, self.common = nn.ParameterList(own), nn.Parameter(own[0] / 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer, own in zip(self.layers, self.own, strict=True):
            spectrum = torch.fft.rfft(layer(x))[..., :2]  # fewer bytes than x
            x = torch.tanh(torch.fft.irfft(spectrum * (own * self.common)[:2], n=WIDTH))
        return x


def test_complex_numbers_are_not_sent() -> None:
    """No cut that `split` chooses goes through them."""
    options: list[dict[str, Any]] = [{"stages": 2}, {"stages": 3}, {"points": ["layers.1"]}]
    for cut in [split(Waves(), X, shared="replicate", **chosen) for chosen in options]:
        travels(cut)
        assert not any(x.is_complex() for x in sent_by(cut, (X,)).values())
        assert [name for _, name in cut.tied[0]] == ["common"] * len(cut.stages)


# What cannot be split


def line_of(name: str) -> str:
    """file:line of the first `# here` behind the class of this name."""
    lines = Path(untraceable.__file__).read_text().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(f"class {name}("))
    return f"untraceable.py:{next(k for k in range(start, len(lines)) if '# here' in lines[k]) + 1}: in "


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Branch", r"`if x.sum\(\) > 0:  # here`: its outcome depends on data, which tracing cannot follow"),
        ("Item", "a number is taken out of a tensor"),
        ("Numpy", "cannot be traced: RuntimeError"),
        ("Rounded", "a torch.autograd.Function, .* cannot be traced: its gradients would be wrong"),
        ("Forces", "cannot be traced: RuntimeError: We found a fake tensor"),
        ("Hooked", "a hook on a tensor cannot be traced"),
        ("Viewed", "changes a tensor in place, which several stages would use; cut elsewhere"),
        ("Input", "changes the input in place, which other stages read, too"),
        ("Strided", "as_strided depends on strides, which may differ in a stage"),
        ("Counted", "changes the buffer seen in place, which several stages would use"),
        ("Resized", "cannot be traced: sets the buffer seen; change it in place, as by copy_"),
        ("First", "would have no computation"),
        ("Returns", "cannot be traced: .*list_iterator"),
        ("Nothing", "no tensor"),
    ],
)
def test_untraceable(name: str, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        split(getattr(untraceable, name)(), X, stages=None if name in MARKED else 2)
    assert line_of(name) in str(refused.value)
    assert "\n" not in str(refused.value) and (name != "Branch" or len(refused.traceback) == 2)
    assert capfd.readouterr() == ("", "")


def test_what_stages_would_not_call_is_refused() -> None:
    module = untraceable.Layers()
    module.second.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="'second', Linear: its backward hook would not be called in a stage"):
        split(module, X, stages=2)
    with pytest.raises(UsageError, match=r"'0\.second', Linear: its backward hook"):
        split_sequential(nn.Sequential(module, nn.ReLU()), 2)

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    with pytest.raises(UsageError, match=r"in forward: .*does more than call the children one after the other"):
        split_sequential(Residual(nn.Linear(2, 2), nn.ReLU()), 2)
    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, output: -output)
    with pytest.raises(UsageError, match="Sequential has a hook of its own, which would not be called"):
        split_sequential(hooked, 2)


class Short(nn.Module):
    """With the names of GPT2Like, and few operations."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(ShortBlock() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ShortBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.dropout(self.norm1(x)))


MARKED = {"Viewed", "Strided", "Counted", "First"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"points": "head"}, "points: the submodule 'h' does not exist"),
        ({"points": [3]}, "points: the submodule 3 does not exist"),
        ({"points": ["blocks.9"]}, "the submodule 'blocks.9' does not exist, but "),
        ({"points": ["blocks.0.dropout"]}, "'blocks.0.dropout' runs 2 times"),
        ({"points": ["blocks"]}, "'blocks' computes nothing"),
        ({"points": ["words"]}, "'words': the stage that ends here would have no computation"),
        ({"points": ["blocks.1", "blocks.1.norm1"]}, "'blocks.1' and 'blocks.1.norm1' begin at the same place"),
        ({"points": ["blocks.1"], "stages": 4}, "make 2 stages, not 4"),
        ({}, "say how many stages, or at which points to cut"),
        ({"stages": 0}, "0 stages: there should be one at least"),
        ({"stages": 4000}, r"can be cut into \d+ stages at most, not 4000"),
        ({"stages": 2, "shared": "send"}, "shared should be 'transmit' or 'replicate', not 'send'"),
    ],
)
def test_wrong_requests(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        split(Short(), TOKENS, **arguments)


def test_examples_that_do_not_fit() -> None:
    for args in ((), (TOKENS, MASK, MASK)):
        with pytest.raises(
            UsageError, match=r"cannot be called with the example: (missing a required|too many positional) argument"
        ):
            split(GPT2Like(), args, stages=2)
    with pytest.raises(UsageError, match="example_kwargs should be a mapping from names, not int"):
        split(GPT2Like(), (TOKENS, MASK), 5, stages=2)  # type: ignore[arg-type]


def test_inputs() -> None:
    class Options(untraceable.Layers):
        def forward(self, pair: tuple[Tensor, Tensor], times: int, *, bias: Any = None, last: Tensor) -> Tensor:
            return self.second(self.first(pair[0]) * times + pair[1]) + last

    args, kwargs = ((X, X + 1), 3), {"last": X - 1, "bias": None}
    module = Options()
    cut = split(module, args, kwargs, stages=2)
    agree(module, cut, args, kwargs)
    for data, why in [
        ((((X, X), 4), kwargs), r"input \[1\] of a microbatch is 4, but the module was traced on 3"),
        (
            (((X[:3], X), 3), kwargs),
            r"input \[0\]\[0\] .* torch.float32 of shape \(3, 16\), but the module was traced on .*\(4, 16\)",
        ),
        (((X, 3), kwargs), "input is not nested as the example of split"),
        ((args, {"last": X}), r"inputs are \['last'\]"),
        ((args, X), r"the batch's input should be \(args, kwargs\), as in the example of split"),
        (X, r"the batch's input should be \(args, kwargs\), as in the example of split"),
    ]:
        with pytest.raises(UsageError, match=why):
            cut.leaves(data)
    with pytest.raises(UsageError, match=r"cannot be traced: .*[Uu]nsupported"):
        split(module, args, {"last": object()}, stages=2)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("third", X)

    def forward(self, pair: list[Tensor], last: Tensor) -> Tensor:
        return self.second(self.first(pair[0]) - pair[1]) * last + self.third


@pytest.mark.parametrize("device", [*further("cpu"), "meta"])
def test_one_tensor_may_be_the_example_of_several_inputs(device: str) -> None:
    x = X.to(device)
    module = Both().to(device)
    module.third = x
    cut = split(module, ([x, x],), {"last": x}, stages=2)
    assert {source for sources in cut.reads for source in sources} >= {Input(0), Input(1), Input(2)}
    if device == "cpu":
        agree(module, cut, ([X, X + 1],), {"last": X + 2})


# Sequential


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


@pytest.mark.parametrize(
    ("stages", "runs"), [(4, ["01", "23", "4", "5"]), ([2, "5"], ["01", "234", "5"]), (["0", "3"], ["012", "345"])]
)
def test_sequential(stages: Any, runs: list[str]) -> None:
    module = layers()
    cut = split_sequential(module, stages)
    assert ["".join(stage._modules) for stage in cut.stages] == runs
    assert cut.reads == [[Input(0)], *([Value(k, 0)] for k in range(len(runs) - 1))]
    agree(module, cut, (X,))


def test_sequential_with_a_child_that_appears_twice() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(WIDTH, WIDTH))
    for stages in (1, 2, 3):
        cut = split_sequential(module, stages)
        agree(module, cut, (X,))
    assert cut.tied == [[(0, "0.weight"), (1, "2.weight")], [(0, "0.bias"), (1, "2.bias")]]


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        (7, "has 6 children, too few for 7 stages"),
        (0, "0 stages"),
        (["9"], "the child '9' does not exist"),
        ([3, 2], r"at children in their order, not at \['3', '2'\]"),
    ],
)
def test_sequential_that_cannot_be_cut(stages: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        split_sequential(layers(), stages)
    with pytest.raises(UsageError, match=r"takes an nn\.Sequential, not Linear"):
        split_sequential(nn.Linear(1, 1), 1)  # type: ignore[arg-type]


# As mpirun takes it


def test_model() -> None:
    def batch(text: Tensor, rng: np.random.Generator) -> tuple[Any, Tensor]:
        return {"mask": MASK, "tokens": TOKENS}, TOKENS

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return nnf.cross_entropy(output["scores"].flatten(0, 1), target.flatten())

    cut = split(GPT2Like(), (), {"tokens": TOKENS, "mask": MASK}, stages=2)
    model = cut.model(loss, batch)
    data, _ = model.batch(TOKENS, np.random.default_rng(0))
    assert data[0] is TOKENS
    assert data[1] is MASK
    assert model.reads == cut.reads
