"""What --verify takes for a difference, and what for rounding; buffers that forwards change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpirun.verify.record import Parameters, Record, compare, directionless, same_bits

LIMIT = 1e-5
START = {(stage, name): torch.full((64,), 0.5) for stage in range(2) for name in ("weight", "bias")}


def trained(gradients: list[Parameters], rate: float = 1e-3, still: str = "") -> Record:
    """A record of training by the sign of gradients, as AdamW does at first; parameters called `still` stay."""
    parameters = {
        key: value - (0 if key[1] == still else rate) * sum(step[key].sign() for step in gradients)
        for key, value in START.items()
    }
    return Record([[1.0]] * len(gradients), gradients, parameters)


def gradient(scale: dict[int, float], seed: int) -> Parameters:
    """Random gradients of all parameters, scaled by stage."""
    noise = torch.Generator().manual_seed(seed)
    return {key: scale[key[0]] * torch.randn(64, generator=noise) for key in START}


def failed(ours: Record, theirs: Record, limit: float = LIMIT, left_out: dict[tuple[int, str], Tensor] | None = None):
    """What differs by more than it may."""
    return [one.what for one in compare(ours, theirs, left_out) if not one.size <= limit]


def test_the_same_is_the_same():
    one = trained([gradient({0: 1, 1: 1}, 0)])
    assert failed(one, one) == failed(one, one, 0.0) == []


def test_a_zero_of_the_other_sign_is_no_difference_but_another_bit():
    one = trained([gradient({0: 1, 1: 1}, 0)])
    plus, minus = ({key: torch.full((64,), zero) for key in START} for zero in (0.0, -0.0))
    for what, a, b in (("losses", [[0.0]], [[-0.0]]), ("gradients", [plus], [minus]), ("parameters", plus, minus)):
        ours, theirs = one._replace(**{what: a}), one._replace(**{what: b})
        assert failed(ours, theirs, 0.0) == [] and same_bits(ours, ours) and not same_bits(ours, theirs)


def test_what_is_no_number_is_not_forgotten():
    one = trained([gradient({0: 1, 1: 1}, 0)])
    for key in START:
        broken = one.parameters[key].clone()
        broken[0] = math.nan
        for limit in (0.0, LIMIT):
            assert "parameters" in failed(one._replace(parameters=one.parameters | {key: broken}), one, limit)
    assert failed(one._replace(losses=[[math.nan]]), one) == ["losses"]
    for loss in (math.nan, math.inf):  # of a step that is skipped
        skipped = one._replace(losses=[[loss]])
        assert failed(skipped, skipped) == failed(skipped, skipped, 0.0) == []
        assert failed(skipped, one) == failed(one, skipped) == ["losses"]


def test_where_nothing_should_be_the_difference_is_infinite():
    one = trained([gradient({0: 1, 1: 1}, 0)])
    nothing = one._replace(gradients=[{key: torch.zeros(64) for key in START}])
    assert [found.size for found in compare(one, nothing) if found.what == "gradients"] == [math.inf]


def test_a_small_step_that_is_not_made_is_seen():
    steps = [gradient({0: 1, 1: 1}, seed) for seed in range(3)]
    for rate in (1e-2, 1e-5):
        assert "parameters" in failed(trained(steps, rate, still="bias"), trained(steps, rate))


def test_gradients_that_vanish_are_compared_by_themselves():
    """A stage may have gradients a million times smaller than another."""
    steps = [gradient({0: 1e-8, 1: 1}, seed) for seed in range(2)]
    theirs = trained(steps)
    lost = [{key: value * key[0] for key, value in step.items()} for step in steps]
    assert failed(theirs._replace(gradients=lost), theirs) == ["gradients"]
    assert sum(int(mask.sum()) for mask in directionless(theirs).values()) == 0


def test_what_begins_as_rounding_is_left_out_and_nothing_else():
    key = (1, "bias")
    first, second = gradient({0: 1, 1: 1}, 0), gradient({0: 1, 1: 1}, 1)
    first[key] = torch.tensor([0.0] * 16 + [1e-7] * 16 + [1.0] * 32)  # none, rounding, and plain
    second[key] = torch.ones(64)
    theirs = trained([first, second])
    left_out = directionless(theirs)
    assert [int(mask.sum()) for mask in left_out.values()] == [0, 0, 0, 16] and left_out[key][16:32].all()
    ours = theirs.parameters | {key: theirs.parameters[key] + torch.where(left_out[key], 2e-3, 0.0)}
    assert failed(theirs._replace(parameters=ours), theirs) == ["parameters"]
    assert failed(theirs._replace(parameters=ours), theirs, LIMIT, left_out) == []


def test_buffers_are_compared_whatever_is_in_them():
    one = trained([gradient({0: 1, 1: 1}, 0)])
    buffers = {
        (0, "mean"): torch.tensor([1.0, math.nan, -math.inf]),
        (0, "wave"): torch.tensor([1.0 + 1j, complex(math.nan, 2), complex(3, math.inf)]),
        (0, "count"): torch.tensor(10**6),
        (1, "used"): torch.tensor([True, False]),
    }
    one = one._replace(buffers=buffers)
    assert failed(one, one) == failed(one, one, 0.0) == []
    wrong = {
        "mean": torch.tensor([1.0, 0.0, -math.inf]),
        "wave": torch.tensor([1.0 + 1j, 2j, complex(3, math.inf)]),
        "count": torch.tensor(10**6 + 1),
        "used": torch.tensor([True] * 2),
    }
    for key in buffers:
        for limit in (0.0, LIMIT):
            assert failed(one._replace(buffers=buffers | {key: wrong[key[1]]}), one, limit) == ["buffers"], key
    for key in ((0, "mean"), (0, "wave")):
        near = one._replace(buffers=buffers | {key: torch.cat([buffers[key][:1] + 1e-6, buffers[key][1:]])})
        assert failed(near, one) == [] and failed(near, one, 0.0) == ["buffers"]
