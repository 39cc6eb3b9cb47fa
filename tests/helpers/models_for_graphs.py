"""Models with a stage that cannot be captured as a graph. No stage may read values of tensors, but a loss may."""

from __future__ import annotations

import itertools
from functools import partial

import torch.nn.functional as nnf
from models_for_tests import WIDTH, dropping_layers, with_stage
from torch import Tensor

from mpirun import Model, split_layers
from mpirun.examples import gpt, mlp

gpt_of_four = partial(gpt.gpt, blocks=2, width=16, heads=4, length=16, sequences=2)  # layers
mlp_of_four = partial(mlp.mlp, hidden=2, width=32, samples=8)


def dropping_of_four(stages: int) -> Model:
    layers = dropping_layers()
    chosen = {name: layers[name] for name in ("embedding", "layer0", "layer2", "score")}
    return mlp.tiny(1)._replace(stages=split_layers(chosen, stages))


# mlp.tiny with another loss


def read_values(scores: Tensor, target: Tensor) -> Tensor:
    return nnf.cross_entropy(scores, target) * (1 + float(scores.detach().mean()))


def count_values(scores: Tensor, target: Tensor) -> Tensor:
    return nnf.cross_entropy(scores, target) * (1 + len((scores.detach() > 0).nonzero()) / scores.numel())


def reads_values_later(stages: int) -> Model:
    """Its loss reads values, from the 13th call on."""
    calls = itertools.count(1)

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return read_values(scores, target) if next(calls) > 12 else nnf.cross_entropy(scores, target)

    return mlp.tiny(stages)._replace(loss=loss)


# mlp.tiny with another second stage


class Counting(mlp.Layer):
    """Scales by the number of its forwards."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1e-3 * self.calls)


class Remembering(mlp.Layer):
    """Scales by a tensor that the previous forward kept, not in a buffer: it has another address each time."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        last, self.last = self.last, 1 + y.detach().mean()
        return y if last is None else y * last


counts_forwards = partial(with_stage, index=1, stage=Counting)


def counts_forwards_and_reads_values(stages: int) -> Model:
    return counts_forwards(stages)._replace(loss=read_values)


def remembers_and_counts_values(stages: int) -> Model:
    return with_stage(stages, 1, Remembering)._replace(loss=count_values)
