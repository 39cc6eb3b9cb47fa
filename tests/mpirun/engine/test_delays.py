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
HOW = ({}, {"delay": 1, "calls": "hooks"}, {"delay": 2, "calls": "thread"})


@pytest.fixture(scope="module")
def runs(inside, text):
    """A short training by every schedule, undisturbed, and twice with delays and calls of MPI; all in one launch."""
    cases = [(name, how) for name in GOLDEN for how in range(len(HOW))]
    common = ["--text", text, "--steps", 2]
    seen = inside(
        4,
        [{"arguments": [TRACES / f"{name}.json", "--model", MODEL[name], *common], **HOW[how]} for name, how in cases],
    )
    return dict(zip(cases, seen, strict=True))


@pytest.mark.parametrize("name", GOLDEN)
def test_delays_and_calls_of_mpi_during_jobs_change_no_bit(runs, name):
    assert all(runs[name, how].code == 0 for how in range(len(HOW)))
    assert len({runs[name, how].weights for how in range(len(HOW))}) == 1


def test_other_schedules_add_in_another_order(runs):
    """Or the same bits would prove nothing."""
    assert len({runs[name, 0].weights for name in ("1f1b", "lpp", "ddp")}) == 3
