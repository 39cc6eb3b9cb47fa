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
CALLS = ("hooks", "thread")  # taken in turns


@pytest.fixture(scope="module")
def runs(inside, text):
    """A short training by every schedule, undisturbed, and with delays and calls of MPI; all in one launch."""
    requests = []
    for number, name in enumerate(GOLDEN):
        run = {"arguments": [TRACES / f"{name}.json", "--model", MODEL[name], "--text", text, "--steps", 2]}
        requests += [run, {**run, "delay": number, "calls": CALLS[number % 2]}]
    seen = inside(4, requests)
    return dict(zip(GOLDEN, zip(seen[::2], seen[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", GOLDEN)
def test_delays_and_calls_of_mpi_during_jobs_change_no_bit(runs, name):
    undisturbed, disturbed = runs[name]
    assert undisturbed.code == disturbed.code == 0
    assert undisturbed.weights == disturbed.weights


def test_other_schedules_add_in_another_order(runs):
    """Or the same bits would prove nothing."""
    assert len({runs[name][0].weights for name in ("1f1b", "lpp", "ddp")}) == 3
