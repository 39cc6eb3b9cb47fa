"""Modules on the meta device: a stage gets its values where it is built, and only its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import further
from plain_models import LENGTH, GPT2Like, Tied
from split_models import scores_of, set_values, with_mask
from torch import Tensor, nn
from untraceable import Layers

from mpirun import Cut, split, split_sequential
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from schedgen.util.errors import UsageError

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)
EXAMPLE = (TOKENS, torch.ones_like(TOKENS))
X = torch.zeros(4, 16)
BUFFERS = ("positions", "mask", "places")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def model(cut: Cut) -> Model:
    return cut.model(scores_of, lambda text, rng: with_mask(text[None].long()), 2 * LENGTH)


def state(built: Model, seed: int = 0) -> dict[str, Tensor]:
    """All parameters and buffers of all stages; those of one name are equal."""
    tensors: dict[str, Tensor] = {}
    for stage in range(len(built.stages)):
        module = build_stage(built, stage, seed)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            assert tensor.device.type == "cpu" and isinstance(tensor, nn.Parameter) == (name not in BUFFERS)
            torch.testing.assert_close(tensors.setdefault(name, tensor), tensor, rtol=0, atol=0)
    return tensors


@pytest.mark.parametrize("shared", ["transmit", *further("replicate")])
def test_values_depend_on_seed_and_name_alone(shared: str) -> None:
    cuts = [split(on_meta(Tied), EXAMPLE, stages=n, shared=shared, init=set_values) for n in (1, 4, 4)]
    first, other = (state(model(cut)) for cut in cuts[:2])
    assert first.keys() == {*dict(Tied().named_parameters()), "positions"}
    assert other.keys() == first.keys()
    assert all(torch.equal(other[name], first[name]) for name in first)
    assert len({value.detach().sum().item() for name, value in first.items() if "mlp.0.weight" in name}) == 2
    assert not torch.equal(state(model(cuts[2]), seed=1)["words.weight"], first["words.weight"])


def test_a_stage_is_what_the_module_with_these_values_is() -> None:
    cut = split(on_meta(lambda: GPT2Like(dropout=0)), EXAMPLE, stages=1, init=set_values)
    stage, module = build_stage(model(cut), 0, 0), GPT2Like(dropout=0)
    module.load_state_dict(stage.state_dict())
    assert cut.output is not None
    torch.testing.assert_close(cut.output.rebuild(stage(*EXAMPLE)), module(*EXAMPLE))


def test_a_rank_makes_the_values_of_its_stages_only() -> None:
    made: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        made.append(module)
        set_values(module)

    cut = split(on_meta(GPT2Like), EXAMPLE, points=["blocks.0", "blocks.1"], init=init)
    split_model = model(cut)
    assert made == []
    build_stage(split_model, 1, 0)
    blocks = [type(part) for part in GPT2Like().blocks[:1].modules() if list(part.parameters(recurse=False))]
    assert sorted(map(str, map(type, made))) == sorted([*map(str, blocks), str(GPT2Like)])  # it has the mask's buffer
    assert [{x.is_meta for x in stage.parameters()} for stage in cut.stages] == [{True}, {False}, {True}]


def test_children_of_a_sequential() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))

    states = []
    for stages in (2, 3):
        cut = split_sequential(on_meta(net), stages)  # type: ignore[arg-type]
        split_model = cut.model(nn.functional.mse_loss, lambda text, rng: (X, X))
        parts = [build_stage(split_model, stage, 0) for stage in range(stages)]
        states.append({name: value for part in parts for name, value in part.state_dict().items()})
    assert states[0].keys() == net().state_dict().keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert (states[0]["1.running_var"] == 1).all() and states[0]["1.num_batches_tracked"] == 0


class Numbers(Layers):
    """Makes a tensor of numbers, which are lost on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x * torch.tensor([2.0] * 16))


class Own(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


class Halved(Own):
    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.ones(8))


class Masked(Layers):
    """Has buffers of types in which no value can mean unset (bool), or of few bytes."""

    mask: Tensor
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(16).bool())
        self.register_buffer("places", torch.arange(16, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.mask + self.places)


def set_layers(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def set_mask(module: nn.Module) -> None:
    set_layers(module)
    if isinstance(module, Masked):
        module.mask.bernoulli_()


def set_places(module: nn.Module) -> None:
    set_layers(module)
    if isinstance(module, Masked):
        module.places.copy_(torch.arange(16))


class Failing(Own):
    def reset_parameters(self) -> None:
        raise ValueError("no\nidea")


class Initialised(Own):
    """As models of transformers: a method for all submodules, here for those in a layer, and not for `scale`."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Own):
            module.first.weight.zero_()
            module.second.weight.zero_()


class InitialisedHalved(Halved, Initialised):
    pass


def nothing(module: nn.Module) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "init", "why"),
    [
        (
            Own,
            None,
            "scale is on the meta device, and neither _init_weights nor reset_parameters gives it values: init should",
        ),
        (Own, nothing, r"\w+(\.weight)? is on the meta device, and init gives it no values"),
        (Halved, None, "scale is on the meta device, and neither _init_weights nor reset_parameters gives it values"),
        (Initialised, None, "scale is on the meta device, and neither _init_weights nor reset_parameters gives it"),
        (InitialisedHalved, None, "neither _init_weights nor reset_parameters gives it values: init should"),
        (Masked, set_mask, "places is on the meta device, and init gives it no values"),
        (Masked, set_places, "mask is on the meta device, and init gives it no values"),
        (Numbers, None, "is on the meta device, and neither _init_weights nor reset_parameters gives it values"),
        (Failing, None, r"stage \d of the model cannot be built: ValueError: no idea"),
        (GPT2Like, nn.Module.zero_grad, r".* and init gives it no values"),
    ],
)
def test_values_that_are_missing(make: Callable[[], nn.Module], init: Any, why: str) -> None:
    example: Any = EXAMPLE if make is GPT2Like else X
    split_model = model(split(on_meta(make), example, stages=2, init=init))
    with pytest.raises(UsageError, match=why):
        for stage in range(2):
            build_stage(split_model, stage, 0)


def test_a_models_own_method_sets_what_others_would() -> None:
    net = on_meta(Initialised)
    net.scale = nn.Parameter(torch.ones(16))
    net.second.weight = nn.Parameter(torch.ones(16, 16))  # these have values
    made = dict(build_stage(Model([net], scores_of), 0, 0).named_parameters())
    assert not made["first.weight"].any() and made["first.bias"].any() and made["second.bias"].any()
    assert made["scale"].sum() == 16 and made["second.weight"].sum() == 16 * 16


def test_booleans_and_short_numbers_that_init_gives() -> None:
    def init(module: nn.Module) -> None:
        set_mask(module)
        if isinstance(module, Masked):
            module.places.copy_(torch.arange(16))

    built = state(model(split(on_meta(Masked), X, stages=2, init=init)))
    assert built["places"].tolist() == [*range(16)] and 0 < built["mask"].sum() < 16


def test_init_is_for_the_meta_device() -> None:
    with pytest.raises(UsageError, match="init gives values to a module on the meta device, but this one has values"):
        split(Layers(), X, stages=2, init=nothing)
