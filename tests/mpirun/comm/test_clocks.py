"""Clocks of ranks are compared: times of one rank's clock become times of rank 0's."""

from __future__ import annotations

import numpy as np

from mpirun.engine.step_trace import ClockReading, as_rank_0_times


def test_clocks(launch):
    result = launch(3, program=["-m", "mpi4py", "programs/check_clocks.py"])
    assert result.out.splitlines() == [
        "holds: one clock is found the same",
        "holds: one clock is left as it is",
        "holds: another clock is found",
        "holds: another clock is corrected",
        "holds: it ends",
    ], result.err


def test_between_two_readings_a_difference_changes_linearly():
    before, after = ClockReading(10.0, 5.0, 1e-6), ClockReading(20.0, 7.0, 1e-6)
    assert np.allclose(as_rank_0_times(np.array([10.0, 15.0, 20.0]), before, after), [15.0, 21.0, 27.0])
