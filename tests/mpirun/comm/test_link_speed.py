"""The cost of a message, fitted to seconds that other programs disturb."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpirun.comm import link_speed
from mpirun.comm.device import Device
from mpirun.comm.link_speed import ROUNDS, SIZES, measure_link_speed

BYTES = np.array(SIZES, np.float64)
QUIET = 3e-6 + 1e-10 * BYTES
DISTURBED = np.where(BYTES < 2**22, 0.01, QUIET)  # all but the longest waited, 10 ms each


@pytest.mark.parametrize("rounds", [[QUIET, DISTURBED], [DISTURBED, QUIET], [DISTURBED] * ROUNDS])
def test_a_disturbed_round_is_measured_again(monkeypatch, rounds):
    """If all rounds are disturbed, bytes seem to cost nothing."""
    freed, left = [], iter(rounds)
    transport = SimpleNamespace(free=lambda: freed.append(True))
    monkeypatch.setattr(link_speed, "make_transport", lambda *_, device: transport)
    monkeypatch.setattr(link_speed, "_one_round", lambda *_: next(left))
    alpha, beta = measure_link_speed(SimpleNamespace(size=2), Device(), crowded=False)
    assert (
        (alpha, beta) == (pytest.approx(3e-6), pytest.approx(1e-10))
        if any(x is QUIET for x in rounds)
        else alpha > 0 == beta
    )
    assert freed == [True] and len([*left]) == (rounds[0] is QUIET)
