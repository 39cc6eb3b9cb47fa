"""A schedule fixes the whole order: however long its instructions take, the same list gives the same bits."""

from __future__ import annotations

import pytest
from examples import further
from golden_cases import TRAINED, ranks, schedule

# One of each way to send, to add up and to update.
NAMES = ("1f1b-tied", "fsdp-sharded", *further("1f1b-tensor", "ddp", "pipedream", "zb-v", "fslpp", "lpp"))


@pytest.fixture(scope="module")
def runs(inside, text, compiled):
    """A short training by every schedule, undisturbed, and with delays and calls of MPI."""
    seen = {}
    for number, name in enumerate(NAMES):
        run = {"arguments": [schedule(name, compiled), "--model", TRAINED[name], "--text", text, "--steps", 2]}
        seen[name] = inside(ranks(name), [run, {**run, "delay": number, "calls": True}])
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_delays_and_calls_of_mpi_during_jobs_change_no_bit(runs, name):
    undisturbed, disturbed = runs[name]
    assert undisturbed.code == disturbed.code == 0
    assert undisturbed.weights == disturbed.weights
