"""What a machine file says of messages and devices, from seconds that were measured."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mpirun.comm import machine_speed
from mpirun.comm.device import Device
from mpirun.comm.machine_speed import ROUNDS, SIZES, fitted, measure_levels, speeds
from schedgen.simulator.machine_file import network_of

BYTES = np.array(SIZES, np.float64)
QUIET = 3e-6 + 1e-10 * BYTES
DISTURBED = np.where(BYTES < 2**22, 0.01, QUIET)  # all but the longest waited, 10 ms each


@pytest.mark.parametrize("rounds", [[QUIET, DISTURBED], [DISTURBED, QUIET], [DISTURBED] * ROUNDS])
def test_a_disturbed_round_is_measured_again(monkeypatch, rounds):
    """A message that takes longer than a longer one was disturbed; the least seconds of all rounds count."""
    freed, left = [], iter(rounds)
    transport = SimpleNamespace(free=lambda: freed.append(True))
    monkeypatch.setattr(machine_speed, "make_transport", lambda *_, device: transport)
    monkeypatch.setattr(machine_speed, "_one_round", lambda *_: [next(left)])
    ((level),) = measure_levels(SimpleNamespace(size=2, allgather=lambda name: [name] * 2), Device(), crowded=False)
    assert level["name"] == "host"
    if any(seconds is QUIET for seconds in rounds):
        assert (level["alpha"], level["beta"]) == (pytest.approx(3e-6), pytest.approx(1e-10))
    assert freed == [True] and len([*left]) == (rounds[0] is QUIET)


def test_messages_that_ask_the_receiver_first_have_an_alpha_of_their_own():
    """From 2 MB on three latencies in place of one: every size takes what was measured."""
    seconds = np.where(BYTES < 2**21, 5e-3, 15e-3) + 8e-9 * BYTES
    alpha, beta = fitted(seconds)
    assert beta == pytest.approx(8e-9) and alpha == [(0, pytest.approx(5e-3)), (2**21, pytest.approx(15e-3))]
    network = network_of({"levels": [{"name": "network", "alpha": [list(each) for each in alpha], "beta": beta}]}, "M")
    assert network.levels[0].latency(BYTES) + beta * BYTES == pytest.approx(seconds)


def test_devices_that_hardly_differ_are_alike():
    assert speeds([1.0, 1.1, 1.05]) == [1, 1, 1] and speeds([1.0, 2.0, 1.25]) == [1, 0.5, 0.8]


def test_the_command_measures_ranks_of_one_host(launch, tmp_path):
    """Any number of devices: a schedule of more ranks is for a larger host."""
    out = tmp_path / "machine.json"
    done = launch(2, "machine", "-o", out)
    assert done.code == 0, done.err
    machine = json.loads(out.read_text())
    (level,) = machine["levels"]
    assert level["name"] == "host" and level["beta"] > 0 and network_of(machine, "M").devices in (None, 2)


def test_one_rank_has_no_links(mistakes, tmp_path):
    (done,) = mistakes(1, [["machine", "-o", tmp_path / "machine.json"]])
    assert done.code and "one rank has no links: launch a rank on every device" in done.err
