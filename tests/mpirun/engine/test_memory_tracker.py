"""The tracker counts what is alive, storage by storage: every number here is worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from mpirun.engine.memory_tracker import MemoryTracker, track_memory

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


def test_an_out_that_grows_counts_as_large_as_it_is(tracker):
    out = torch.empty(0)
    torch.add(torch.ones(7), 1, out=out)
    assert tracker.live == 7 * FLOAT and tracker.peak == 14 * FLOAT


def test_lists_of_tensors_count_each(tracker):
    some = torch._foreach_add([torch.ones(3), torch.ones(5)], 1)
    torch._foreach_mul_(some, 2)
    assert tracker.live == 8 * FLOAT and tracker.peak == 16 * FLOAT
    parts = torch.ones(12).split(4)
    assert len(parts) == 3 and tracker.live == (8 + 12) * FLOAT


def test_a_tensor_of_numbers_counts(tracker):
    x = torch.tensor([1.0, 2.0])
    assert tracker.live == x.nbytes


def test_tensors_without_data_do_not_count(tracker):
    with FakeTensorMode():
        fake = torch.ones(10)
    meta = torch.ones(10, device="meta")
    assert fake.device.type == "cpu" and meta.shape == fake.shape
    assert tracker.live == tracker.peak == 0


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


def test_linear_layers_keep_their_inputs_and_outputs():
    layers, x = Layers(), torch.ones(8, 6)
    with MemoryTracker() as tracker:
        y = layers(x)
        assert tracker.live == (8 * 5 + 8 * 3) * FLOAT  # the second one's input, the output; x was there before
        loss = y.sum()
        del y
        assert tracker.live == (8 * 5 + 1) * FLOAT  # a sum does not keep what it adds up
        loss.backward()
        assert tracker.live == (PARAMETERS + 1) * FLOAT


def test_the_peak_within_a_backward():
    """The most is alive when the second layer is done and its input not yet freed."""
    layers, x = Layers(), torch.ones(8, 6)
    with MemoryTracker() as tracker:
        y = layers(x)
        root, gradient = get_gradient_edge(y), torch.ones_like(y)
        del y
        assert tracker.live == (8 * 5 + 8 * 3) * FLOAT
        tracker.reset_peak()
        grads = torch.autograd.grad([root], [*layers.parameters()], [gradient])
        assert tracker.peak == (8 * 5 + 8 * 3 + 8 * 5 + 5 * 3 + 3) * FLOAT
        assert len(grads) == 4 and tracker.live == (8 * 3 + PARAMETERS) * FLOAT


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


def test_measure_on_the_cpu():
    with track_memory(torch.device("cpu")) as memory:
        x = torch.ones(5)
        assert memory.live == memory.peak == x.nbytes
