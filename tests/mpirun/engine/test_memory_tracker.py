"""The tracker counts what is alive, storage by storage: every number here is worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpirun.engine.memory_tracker import MemoryTracker

FLOAT = 4  # bytes


@pytest.fixture
def tracker():
    with MemoryTracker() as tracker:
        yield tracker


def test_a_tensor_counts_from_its_op_to_its_death(tracker):
    x = torch.ones(10)
    y = torch.zeros(6, dtype=torch.float64)
    assert tracker.live == 10 * FLOAT + 6 * 8
    del x
    assert tracker.live == 6 * 8 and tracker.peak == 10 * FLOAT + 6 * 8
    tracker.reset_peak()
    assert tracker.peak == 6 * 8
    del y
    assert tracker.live == 0


def test_views_and_in_place_ops_cost_nothing(tracker):
    x = torch.ones(4, 5)
    views = [x[1:], x.t(), x.view(-1), x.detach(), x.expand(3, 4, 5)]
    x.add_(1).mul_(x)
    torch.add(x, 1, out=x)
    assert tracker.live == tracker.peak == 20 * FLOAT
    del x
    assert tracker.live == 20 * FLOAT  # by the views
    del views
    assert tracker.live == 0


def test_what_was_there_before_does_not_count():
    x = torch.ones(10)
    with MemoryTracker() as tracker:
        x.add_(1)
        view = x[2:]
        assert tracker.live == tracker.peak == 0
        del x, view
        assert tracker.live == 0


class Layers(nn.Sequential):
    """Two linear layers, 6 -> 5 -> 3, on 8 rows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Linear(5, 3))


PARAMETERS = (6 * 5 + 5) + (5 * 3 + 3)


def test_the_same_bytes_in_each_of_50_steps():
    layers, x = Layers(), torch.ones(8, 6)
    optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
    with MemoryTracker() as tracker:
        counts = []
        for _ in range(50):
            tracker.reset_peak()
            layers(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append((tracker.live, tracker.peak))
        assert len(set(counts[1:])) == 1
        assert tracker.live == (2 * PARAMETERS + 4) * FLOAT  # two moments, and a step count of each parameter
