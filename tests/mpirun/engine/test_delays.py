"""A schedule is the whole order: however long its parts take, the same list gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[3] / "traces"
# One of each way to send, to add up and to update.
GOLDEN = ("1f1b", "1f1b-tensor", "1f1b-tied", "ddp", "fsdp-sharded", "fslpp", "lpp", "pipedream", "zb-v")
MODEL = dict.fromkeys(GOLDEN, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}
DELAYS = (None, 1)  # seeds


@pytest.fixture(scope="module")
def runs(inside, text):
    """A short training by every golden schedule, without delays and with two kinds of them; all in one launch."""
    cases = [(name, delay) for name in GOLDEN for delay in DELAYS]
    common = ["--text", text, "--steps", 2]
    seen = inside(
        4,
        [
            {"arguments": [TRACES / f"{name}.json", "--model", MODEL[name], *common], "delay": delay}
            for name, delay in cases
        ],
    )
    return dict(zip(cases, seen, strict=True))


@pytest.mark.parametrize("name", GOLDEN)
def test_delays_change_no_bit(runs, name):
    assert all(runs[name, delay].code == 0 for delay in DELAYS)
    assert len({runs[name, delay].weights for delay in DELAYS}) == 1


def test_other_schedules_add_in_another_order(runs):
    """Or the same bits would prove nothing."""
    assert len({runs[name, None].weights for name in ("1f1b", "lpp", "ddp")}) == 3
