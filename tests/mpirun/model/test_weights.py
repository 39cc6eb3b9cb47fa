"""`Model.weights`: what stages take from it, what is copied, initialised, reported and refused; `Pretrained` files."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from examples import further
from plain_models import LENGTH, Tied
from safetensors.torch import save_file
from split_models import scores_of, set_values
from torch import Tensor, nn

from mpirun import Model, MpirunWarning, split, split_sequential
from mpirun.checkpoint.pretrained import Pretrained, check_weights
from mpirun.engine.expand_slices import expand_model
from mpirun.model.build_stage import build_stage
from mpirun.model.parallel_layers import UNSLICED, ColumnParallelLinear, RowParallelLinear, Slice
from mpirun.model.stage_copies import fake_mode, stage_without_values
from schedgen.util.errors import UsageError

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)
EXAMPLE = {"tokens": TOKENS, "mask": torch.ones_like(TOKENS)}
GPT2 = {
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
X = torch.ones(4, 16)


class Recorded:
    """Weights that record the names that they were asked for."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.asked: list[str] = []

    def __call__(self, names: Collection[str]) -> dict[str, Tensor]:
        self.asked += names
        return {name: self.values[name] for name in names if name in self.values}


def counting(size: int, start: float) -> nn.Linear:
    layer = nn.Linear(size, size)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(size * size).view(size, size) + start)
    return layer


def layers() -> OrderedDict[str, nn.Module]:
    return OrderedDict((f"layer{k}", counting(16, k / 4)) for k in range(3))


def stage_entries(kind: str) -> tuple[Model, dict[str, Tensor]]:
    """A model of two stages, and values for it by name."""
    torch.manual_seed(3)
    values = {name: torch.randn_like(value) for name, value in nn.Sequential(layers()).state_dict().items()}
    loss: Any = nn.functional.mse_loss
    if kind == "layers":
        makers = {name: (lambda name=name: layers()[name]) for name in layers()}
        names = list(makers)
        return Model([{n: makers[n] for n in part} for part in (names[:2], names[2:])], loss), values
    if kind == "modules":
        parts = list(layers().items())
        stages = [nn.Sequential(OrderedDict(part)) for part in (parts[:2], parts[2:])]
        own = {f"stage{k}.{name}": values[name] for k, part in enumerate(stages) for name in part.state_dict()}
        return Model(stages, loss), own
    with torch.device("meta" if kind == "meta" else "cpu"):
        net = nn.Sequential(layers())
    return (split_sequential(net, 2) if kind == "sequential" else split(net, X, stages=2)).model(loss), values


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", ["layers", "modules", "sequential", "split", "meta"])
def test_stages_ask_for_their_own(kind: str, mapped: bool) -> None:
    model, values = stage_entries(kind)
    weights = Recorded(values)
    model = model._replace(weights=weights)
    for stage in range(2):
        weights.asked = []
        module = build_stage(model, stage, 0, mapped=mapped)
        own = {model.entry_name(stage, name): value for name, value in module.named_parameters()}
        assert set(weights.asked) == own.keys() and all(torch.equal(values[name], own[name]) for name in own)
        weights.asked = []
        fetched = build_stage(model, stage, 0, values=False)  # another rank has them
        assert not weights.asked and [p.shape for p in fetched.parameters()] == [p.shape for p in own.values()]
        assert not any(parameter.is_meta for parameter in fetched.parameters())


def gpt2() -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    torch.manual_seed(0)
    gpt2().save_pretrained(tmp_path / "model", max_shard_size="60KB")
    yield tmp_path / "model"


@pytest.mark.parametrize("on_meta", [True, *further(False)])
def test_a_model_of_transformers(directory: Path, on_meta: bool) -> None:
    assert (directory / "model.safetensors.index.json").exists()
    with torch.device("meta" if on_meta else "cpu"):
        net = gpt2()
    made: list[nn.Module] = []

    cut = split(net, {"input_ids": TOKENS, "use_cache": False}, stages=2, init=made.append if on_meta else None)
    model = cut.model(lambda output, target: output.logits.mean(), weights=Pretrained(directory))
    assert not check_weights(model)
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for stage in range(2):
        for name, value in build_stage(model, stage, 0).named_parameters():
            assert torch.equal(value, plain.get_parameter(name))
    assert not made  # all parameters were loaded, and it has no other tensors


def test_tied_under_another_name_and_what_is_missing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    values = {name: value.clone() for name, value in Tied(blocks=3).state_dict().items()}
    words = values.pop("words.weight")  # the file has the head's name of it
    values["odd"] = torch.ones(2)
    save_file(
        {name: value for name, value in values.items() if not name.startswith("blocks.1")}, tmp_path / "a.safetensors"
    )
    for shared in (*further("transmit"), "replicate"):
        with torch.device("meta"):
            net = Tied(blocks=3)
        kinds: list[str] = []

        def init(module: nn.Module, kinds: list[str] = kinds) -> None:
            kinds.append(type(module).__name__)
            set_values(module)

        cut = split(net, EXAMPLE, points=["blocks.1", "blocks.2"], init=init, shared=shared)
        model = cut.model(scores_of, weights=Pretrained(tmp_path))
        where = f"weights in {tmp_path}"
        assert check_weights(model) == [
            f"{where}: has no blocks.1.norm1.weight, blocks.1.norm1.bias, blocks.1.norm2.weight, blocks.1.norm2.bias "
            "and 6 more: trained from the values that the model is built with",
            f"{where}: no stage uses odd",
        ]
        last = build_stage(model, 2, 0)
        if shared == "replicate":
            assert torch.equal(last.get_parameter("words.weight"), words)
        assert torch.equal(build_stage(model, 0, 0).get_parameter("words.weight"), words)
        built = build_stage(model, 1, 0)
        assert sorted(kind for kind in kinds if kind != "Tied") == ["LayerNorm"] * 2 + ["Linear"] * 3
        assert not built.get_parameter("blocks.1.qkv.weight").isnan().any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layer2.bias": torch.ones(3)}, "weights: layer2.bias has shape (3,), but (16,) in the model"),
        ({"layer2.bias": torch.ones(16, dtype=torch.long)}, "layer2.bias is torch.int64, but torch.float32 in"),
    ],
)
def test_weights_that_do_not_fit(change: dict[str, Tensor], why: str) -> None:
    model, values = stage_entries("split")
    with pytest.raises(UsageError, match=re.escape(why)):
        build_stage(model._replace(weights=Recorded(values | change)), 1, 0)


def test_types_are_the_model_s_and_buffers_are_copied() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    norm[1].bias.requires_grad_(False)
    values = {name: value.clone().to(torch.bfloat16) if value.is_floating_point() else value + 5
              for name, value in norm.state_dict().items()}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MpirunWarning)
        model = split_sequential(norm, 1).model(nn.functional.mse_loss, weights=Recorded(values))
    module = build_stage(model, 0, 0, mapped=True)
    assert module.get_parameter("0.weight").dtype is torch.float32 and not module.get_parameter("1.bias").requires_grad
    counter = module.get_buffer("0.num_batches_tracked")
    assert counter == 5 and counter is not values["0.num_batches_tracked"]


class Halves(nn.Module):
    def __init__(self, slice: Slice = UNSLICED) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(4, 8, slice), RowParallelLinear(8, 4, slice)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def test_a_slice_takes_its_share() -> None:
    torch.manual_seed(0)
    full = Halves()
    weights = Recorded({f"mlp.{name}": value for name, value in full.state_dict().items()})
    model = Model([{"mlp": Halves}, {"last": nn.Identity}], nn.functional.mse_loss, sliced=[0], weights=weights)
    slices = [build_stage(expand_model(model, 2), t, 0) for t in range(2)]
    x = torch.randn(3, 4)
    torch.testing.assert_close(slices[0](x) + slices[1](x), full(x))


def test_nothing_is_initialised_for_shapes() -> None:
    def never(module: nn.Module) -> None:
        raise AssertionError("init")

    with torch.device("meta"):
        net = Tied()
    model = split(net, EXAMPLE, stages=2, init=never).model(scores_of, weights=Recorded({}))
    for stage in range(2):
        with stage_without_values(model, stage, fake_mode()) as module:
            assert not any(value.is_meta for value in (*module.parameters(), *module.buffers()))


class Marked(nn.Module):
    """Its bias has an attribute, by which it is initialised; so has its frozen scale."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, device=device)
        self.scale = nn.Parameter(torch.ones(16, device=device), requires_grad=False)
        self.linear.bias.value = self.scale.value = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def set_marked(module: nn.Module) -> None:
    """Set parameters to their attribute, or 0."""
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, getattr(parameter, "value", 0.0))


@pytest.mark.parametrize("how", ["module", "function", "split", "sequential", "meta", "meta with weights"])
def test_parameters_keep_their_attributes(how: str) -> None:
    net = Marked("meta" if "meta" in how else "cpu")
    values = {f"stage0.{name}": torch.ones(x.shape) for name, x in net.named_parameters()}
    made = {
        "module": lambda: Model([net], scores_of),
        "function": lambda: Model([Marked], scores_of),
        "split": lambda: split(nn.Sequential(net, nn.Linear(16, 16)), X, stages=2).model(scores_of),
        "sequential": lambda: split_sequential(nn.Sequential(net), 1).model(scores_of),
        "meta": lambda: split_sequential(nn.Sequential(net), 1, init=set_marked).model(scores_of),
        "meta with weights": lambda: Model([net], scores_of, weights=lambda names: {n: values[n] for n in names}),
    }[how]()

    def marked(module: nn.Module) -> set[str]:
        names = {name for name, x in module.named_parameters() if getattr(x, "value", None) == 3.0}
        return {name.removeprefix("0.") for name in names}

    with stage_without_values(made, 0, fake_mode()) as fake:
        assert marked(fake) == {"linear.bias", "scale"}
    stage = build_stage(made, 0, 0)
    assert marked(stage) == {"linear.bias", "scale"}
    if how == "meta":
        assert {x.mean().item() for x in stage.parameters()} == {0.0, 3.0}


def test_compiled_modules_stay_compiled_or_it_is_said() -> None:
    traced: list[object] = []

    def backend(graph: Any, example: Any) -> Any:
        traced.append(graph)
        return graph.forward

    def compiled(in_place: bool) -> Any:
        net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        if in_place:
            net.compile(backend=backend)
            return net
        return torch.compile(net, backend=backend)

    loss = nn.functional.mse_loss
    for in_place in (False, True):
        with pytest.warns(MpirunWarning, match=r"^torch.compile of \w+ is lost: stages run the operations that are"):
            cut = split(compiled(in_place), X, stages=2)
        assert cut.model(loss).entry_name(0, next(iter(dict(cut.stages[0].named_parameters())))) == "0.weight"
    build_stage(Model([compiled(False)], loss), 0, 0)(X)
    assert traced
    net = compiled(True)
    assert build_stage(Model([net], loss), 0, 0) is net
    assert net._compiled_call_impl is not None
    with pytest.warns(MpirunWarning, match=r"^Module.compile of the Sequential is lost: compile its children$"):
        split_sequential(compiled(True), 2)
    torch._dynamo.reset()
