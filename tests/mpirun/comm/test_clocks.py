"""Clocks of ranks are compared: times of one rank's clock become times of rank 0's."""

from __future__ import annotations


def test_clocks(launch):
    result = launch(3, program=["-m", "mpi4py", "programs/check_clocks.py"])
    assert result.out.splitlines() == [
        "holds: one clock is found the same",
        "holds: another clock is found",
        "holds: it ends",
    ], result.err
