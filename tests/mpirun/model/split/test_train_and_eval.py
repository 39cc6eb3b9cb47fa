"""Train and eval mode: stages compute bit for bit what the plain module does in both, and refuse what they cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
import transformers
from examples import further
from plain_models import GPT2Like, ResNetLike
from split_models import sent_by
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from untraceable import Layers

from mpirun import Cut, MpirunWarning, Value, split
from mpirun.model.module_tensors import frozen_statistics

IMAGE = torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8)
TOKENS = torch.arange(16).view(2, 8)
X = torch.linspace(-1, 1, 64).view(4, 16)


class ResNet(ResNetLike):
    """With a dropout."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(nnf.dropout(image, 0.2, self.training))


class Regions(Layers):
    """Normalisation and dropout in a region of autocast, and attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.drop(self.norm(self.first(x)))
        q = self.second(x.float()).view(4, 2, 2, 4)
        return nnf.scaled_dot_product_attention(q, q, q, dropout_p=0.2 * self.training)


class Kinds(nn.Module):
    """Other operations that follow the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(4, eps=1e-3))
        self.unfollowed = nn.BatchNorm2d(4, track_running_stats=False)
        self.drops = nn.Sequential(nn.Dropout2d(0.5), nn.AlphaDropout(0.2), nn.RReLU(inplace=True))
        self.recurrent = nn.GRU(8, 5, 2, dropout=0.3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.drops(self.unfollowed(self.norms(self.first(image))))
        return self.recurrent(x.mean(1))[0]


class Siamese(Layers):
    """A trunk with a normalisation that is called twice, also in a region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.norm(self.first(x)), self.norm(self.first(y))
        with torch.autocast("cpu", torch.bfloat16):
            x, y = self.inner(x), self.inner(y)
        return self.second((x - y).float().abs())


class Attention(nn.Module):
    """With dropout of the weights that it returns, an operation that eval mode does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(16, 2, dropout=0.5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        made, weights = self.attention(x, x, x)
        return self.last(made), weights


def gpt2() -> nn.Module:
    options = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def outputs(cut: Cut, data: Any) -> list[Tensor]:
    """The leaves of the module's output, from its stages one after the other."""
    torch.manual_seed(1)
    sent = sent_by(cut, cut.leaves(data))
    last = len(cut.stages) - 1
    made = [value for source, value in sent.items() if isinstance(source, Value) and source.stage == last]
    assert cut.output is not None
    return [leaf for leaf in tree_leaves(cut.output.rebuild(made)) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(
    ("make", "example", "stages"),
    [
        *further((ResNet, IMAGE, 3)),
        (Regions, X, 2),
        (Kinds, IMAGE, 3),
        (Attention, X, 2),
        *further((Siamese, (X, X + 1), 2), (gpt2, {"input_ids": TOKENS, "use_cache": False}, 4)),
        *further((GPT2Like, (TOKENS, torch.ones_like(TOKENS)), 2)),
    ],
)
def test_both_modes_are_the_module_s(make: Callable[[], nn.Module], example: Any, stages: int) -> None:
    torch.manual_seed(0)
    module = make()
    cut = split(copy.deepcopy(module), example, stages=stages)
    for training in (True, False, True):
        module.train(training)
        for stage in cut.stages:
            stage.train(training)
        torch.manual_seed(1)
        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        expected = module(*(args if isinstance(args, tuple) else (args,)), **kwargs)
        for value, wanted in zip(outputs(cut, example), tree_leaves(expected), strict=True):
            assert torch.equal(value, wanted)
        buffers = {name: buffer for stage in cut.stages for name, buffer in stage.named_buffers()}
        assert all(torch.equal(buffers[name], value) for name, value in module.named_buffers() if name in buffers)
    assert module.training


def test_the_mode_in_which_it_is_traced() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)) for _ in range(2)))
    module[0].eval()
    cut = split(module, X, stages=2)
    module.train()
    assert all(part.training for part in module.modules())
    outputs(cut, X)
    buffers = {name: buffer for stage in cut.stages for name, buffer in stage.named_buffers()}
    assert "0.1.num_batches_tracked" not in buffers and buffers["1.1.num_batches_tracked"] == 1
    with pytest.warns(MpirunWarning, match="eval mode"):
        split(module.eval(), X, stages=2)


class Always(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(nnf.dropout(self.first(x), 0.1))


@pytest.mark.filterwarnings("ignore:.*is in eval mode:schedgen.util.errors.MpirunWarning")
def test_what_drops_in_eval_mode_does_so_where_eval_mode_is_traced() -> None:
    module = Always().eval()
    cut = split(module, X, stages=2)
    for training in (False, True):
        for stage in cut.stages:
            stage.train(training)
        torch.manual_seed(1)
        expected = module(X)
        assert torch.equal(outputs(cut, X)[0], expected)


@pytest.mark.parametrize("traced", [True, False])
def test_a_forward_that_is_done_again_updates_statistics_once(traced: bool) -> None:
    module = ResNetLike()
    stage = split(module, IMAGE, stages=1).stages[0] if traced else module
    first = stage(IMAGE)
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    with frozen_statistics(stage):
        again = stage(IMAGE)
    again.sum().backward()
    assert torch.equal(first, again)
    assert before["down1.norm.num_batches_tracked"] == 1
    assert all(torch.equal(before[name], buffer) for name, buffer in stage.named_buffers())
