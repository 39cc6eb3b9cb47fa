"""Shapes and types on a GPU, found on fake tensors without one: autocast has a list of operations for each device."""

from __future__ import annotations

import models_for_tests
import numpy as np
import pytest
import torch

from mpirun.data.microbatches import Microbatches
from mpirun.examples import mlp
from mpirun.model.contract import Model
from mpirun.model.stage_shape import StageShape
from mpirun.model.trial import Trial

CHAIN = [(), (0,), (1,), (2,)]
TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8))


def shapes(model: Model, device: str, dtype: torch.dtype | None = None) -> list[StageShape]:
    """Shapes of stages without the loss, which needs values, and without gradients, for which torch needs the GPU."""
    assert model.batch is not None
    batch = Microbatches(model.batch, TEXT, 0, 1)(0, 0)
    reads = model.resolved_reads(CHAIN, len(batch.leaves))
    return Trial(
        model._replace(loss_of="minibatch"), reads, batch, dtype, torch.device(device), lambda _, module: module.train()
    ).shapes()


def types(model: Model, device: str) -> list[torch.dtype]:
    """The types of the stages' outputs under autocast to bf16."""
    return [shape.outputs[0].dtype for shape in shapes(model, device, torch.bfloat16)]


@pytest.fixture
def gpu_regions(monkeypatch):
    """Let torch enter autocast regions of a GPU that it lacks, without their cache: its autograd graphs need one."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    torch.set_autocast_cache_enabled(False)
    yield
    torch.set_autocast_cache_enabled(True)


def test_a_layer_norm_gives_float32_on_a_gpu(gpu_regions):
    model = models_for_tests.ends_in_norms(4)
    assert types(model, "cuda:0") == [torch.float32] * 3 + [torch.bfloat16]
    assert types(model, "cpu") == [torch.bfloat16] * 4


@pytest.mark.parametrize("model", [mlp.tiny, models_for_tests.dropping, models_for_tests.dropping_by_host])
def test_without_autocast_a_gpu_and_a_cpu_give_the_same(model):
    assert shapes(model(4), "cuda:0") == shapes(model(4), "cpu")
