"""A module that is traced once for each bucket: stages compute what it does, for each of the lengths."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import further
from plain_models import WORDS, Tied
from split_models import agree
from torch import Tensor, nn

from mpirun import split
from schedgen.util.errors import UsageError

BUCKETS, WIDTH = (6, 10), 8


def of_length(length: int, samples: int = 4) -> Tensor:
    return torch.arange(samples * length).view(samples, length) * 7 % WORDS


class Net(nn.Module):
    """Layers between an embedding and a head, with constants and operations that depend on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH), persistent=False)

    def encoded(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens)) * torch.tensor([1.0, tokens.shape[1]]).mean()
        return self.norm(self.first(x).mT).mT * self.scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.second(self.encoded(tokens))) * self.scale)


class Pooled(Net):
    """Of which the last layers get the same shapes for all lengths."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.second(self.encoded(tokens).mean(1)) * torch.tensor(2.0)))


class Looped(Net):
    """Of whose graphs one has more operations."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for k in range(tokens.shape[1]):
            x = torch.tanh(self.first(x) + k)
        return self.head(self.drop(x))


class Elsewhere(Net):
    """Whose second layer comes before the head or behind it."""

    def forward(self, tokens: Tensor) -> Tensor:
        layers = [self.second, self.head]
        for layer in layers if tokens.shape[1] > BUCKETS[0] else reversed(layers):
            tokens = layer(tokens if tokens.is_floating_point() else self.words(tokens))
        return tokens


class Skipping(Net):
    """Whose last stage reads more of long sequences."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.words(tokens))
        y = self.second(x)
        return self.head(y) + x if tokens.shape[1] > BUCKETS[0] else self.head(y)


class Scaled(Pooled):
    """Whose head depends on lengths that it does not see."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoded(tokens).mean(1)) * tokens.shape[1]


pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("where", [{"stages": 3}, {"points": ["second", "head"]}])
@pytest.mark.parametrize("make", [Net, Pooled])
def test_stages_compute_what_the_module_does_for_each_length(make: Callable[[], nn.Module], where: Any) -> None:
    """And they have its parameters, and save what it saves."""
    module = make()
    cut = split(module, of_length(BUCKETS[0]), buckets=BUCKETS, **where)
    assert {*module.parameters()} == {*nn.ModuleList(cut.stages).parameters()}
    saved = {name for stage in cut.stages for name in stage.state_dict()}
    assert {name for name in saved if "lifted" not in name} == module.state_dict().keys()
    for length in (6, 10, 6):
        agree(module, cut, (of_length(length),))


@pytest.mark.parametrize("shared", [*further("transmit"), "replicate"])
def test_shared_parameters_and_loops(shared: str) -> None:
    mask = torch.ones(4, 6, dtype=torch.long)
    tied, looped = Tied(), Looped()
    of_tied = split(tied, (of_length(6),), {"mask": mask}, stages=3, shared=shared, buckets=(6, 4))
    for length in (6, 4):
        agree(tied, of_tied, (of_length(length),), {"mask": mask[:, :length]})
    of_looped = split(looped, of_length(10), points=["head"], buckets=BUCKETS)
    assert len({len(inspect.getsource(graph)) for graph in of_looped.stages[0].graphs.values()}) == 2
    for length in BUCKETS:
        agree(looped, of_looped, (of_length(length),))


def test_schedules_join_stages_of_all_buckets() -> None:
    module = Net()
    joined = split(module, of_length(6), stages=3, buckets=BUCKETS).join([1, 2])  # type: ignore[misc]
    assert len(joined.stages) == 2
    for length in BUCKETS:
        agree(module, joined, (of_length(length),))


DIFFERENT = "buckets: for 10 stages would have other parameters, or send other values, than for 6: cut elsewhere"
REFUSED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (Elsewhere, {"points": ["head"]}, DIFFERENT),
    (Skipping, {"points": ["second", "head"]}, DIFFERENT),
    (Scaled, {"points": ["head"]}, "buckets: stage 1 gets the same shapes in several, but computes other values"),
    (Net, {"stages": 2, "buckets": 64}, "buckets should be sizes, whole numbers of at least 1, not 64"),
]


@pytest.mark.parametrize(("make", "options", "why"), REFUSED)
def test_what_cannot_be_one_stage_for_all_lengths_is_refused(
    make: Callable[[], nn.Module], options: Any, why: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        split(make(), of_length(6), **{"buckets": BUCKETS, **options})


def test_other_shapes_are_refused() -> None:
    cut = split(Net(), of_length(6), stages=2, buckets=BUCKETS)
    why = "is torch.int64 of shape (4, 7), but the module was traced on torch.int64 of shape (4, 6): every microbatch "
    with pytest.raises(UsageError, match=re.escape(f"{why}has the example's shapes, of one of buckets=(6, 10)")):
        cut.leaves(of_length(7))
    with pytest.raises(UsageError, match="buckets are sizes of dimension 1 of the input, but no tensor of the example"):
        split(nn.Linear(4, 4), torch.ones(4), stages=1, buckets=BUCKETS)
