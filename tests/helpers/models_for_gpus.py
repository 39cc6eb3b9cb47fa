"""Models whose jobs take a GPU as long as is asked for, as `--model models_for_gpus:NAME`."""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpirun import Model
from mpirun.examples import mlp


@cache
def cycles_per_ms() -> float:
    """How many cycles of `torch.cuda._sleep` take a millisecond, once the GPU's clock has risen."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        begin.record()
        torch.cuda._sleep(10**8)
        end.record()
    end.synchronize()
    return 10**8 / begin.elapsed_time(end)


class Sleep(torch.autograd.Function):
    """x -> x; one kernel that takes JOB_MS milliseconds, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            torch.cuda._sleep(int(float(os.environ["JOB_MS"]) * cycles_per_ms()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Sleep.apply(gradient)


class Sleeping(nn.Module):
    """A layer that takes long and does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x)


def sleeping(stages: int) -> Model:
    """mlp.tiny, each of whose jobs takes JOB_MS milliseconds."""
    model = mlp.tiny(stages)
    return model._replace(stages=[{**layers, f"sleep{s}": Sleeping} for s, layers in enumerate(model.stages)])


def compiled(stages: int) -> Model:
    """An MLP each of whose stages is one compiled module, whose jobs take milliseconds; messages have 2 MiB."""
    model = mlp.mlp(stages, hidden=8 * stages, width=4096, samples=128)

    def module(layers: Any) -> Any:
        return lambda: torch.compile(nn.Sequential(OrderedDict((name, make()) for name, make in layers.items())))

    return model._replace(stages=[module(layers) for layers in model.stages])
