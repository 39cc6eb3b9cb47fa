"""The cost of a message, fitted to seconds that other programs disturb."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpirun.comm import link_speed
from mpirun.comm.device import Device
from mpirun.comm.link_speed import SIZES, fit_alpha_beta, fit_rounds, measure_link_speed

BYTES = np.array(SIZES, np.float64)
QUIET = 3e-6 + 1e-10 * BYTES
DISTURBED = np.where(BYTES < 2**22, 0.01, QUIET)  # all but the longest waited, 10 ms each


def test_a_round_that_nothing_disturbs_is_enough():
    rounds = iter([QUIET, DISTURBED])
    assert fit_rounds(BYTES, rounds) == pytest.approx((3e-6, 1e-10))
    assert next(rounds) is DISTURBED


def test_a_disturbed_round_is_measured_again():
    assert fit_alpha_beta(BYTES, DISTURBED)[1] == 0
    assert fit_rounds(BYTES, [DISTURBED, QUIET]) == pytest.approx((3e-6, 1e-10))


def test_rounds_that_are_all_disturbed_say_that_bytes_cost_nothing():
    alpha, beta = fit_rounds(BYTES, [DISTURBED] * 3)
    assert alpha > 0
    assert beta == 0


def test_the_transport_is_freed(monkeypatch):
    freed = []
    transport = SimpleNamespace(free=lambda: freed.append(True))
    monkeypatch.setattr(link_speed, "make_transport", lambda *_, device: transport)
    monkeypatch.setattr(link_speed, "_one_round", lambda *_: QUIET)
    assert measure_link_speed(SimpleNamespace(size=2), Device(), crowded=False) == pytest.approx((3e-6, 1e-10))
    assert freed == [True]
