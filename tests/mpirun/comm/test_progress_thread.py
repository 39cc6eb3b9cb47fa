"""Messages move while ranks compute, and ranks that wait leave the cores to others.

These claims are about time, so each is a ratio within one launch, of medians
over many turns, with a limit far from what is measured: a wait takes about a
tenth of a core, and a message of 16 MiB in flight during a computation of 40 ms
needs no wait afterwards. programs/measure_waits.py measures.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
from mpi4py import MPI

from mpirun.comm.progress_thread import MessageProgress

FASTEST = 2**24 / 20e9  # seconds for 16 MiB through memory: after a shorter wait the message had arrived before


@pytest.fixture(scope="module")
def measured(launch) -> dict[str, Any]:
    result = launch(4, program=["-m", "mpi4py", "programs/measure_waits.py"])
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_rank_that_waits_uses_less_than_half_a_core(measured):
    assert len(measured["waiting"]) == 4 and max(measured["waiting"]) < 0.5


def test_with_calls_of_mpi_a_message_hides_behind_a_computation(measured):
    """At least half of the wait that there is without these calls."""
    if not measured["works"]:
        pytest.skip("this MPI lets one thread in only")
    transfer, plain, with_calls = (median(measured[what]) for what in ("transfer", "plain", "thread"))
    if plain < max(transfer / 2, FASTEST):
        pytest.skip("this MPI moves messages by itself")
    assert with_calls < plain / 2, measured


def test_a_computation_that_fails_leaves_no_call_behind():
    progress = MessageProgress(MPI.COMM_SELF)

    def fail() -> None:
        raise ValueError("thirteen is unlucky")

    with pytest.raises(ValueError, match="unlucky"):
        progress.with_thread(fail)()
    assert not progress.computing
    progress.free()
