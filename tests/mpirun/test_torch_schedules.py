"""torch's own schedules, read from the CSV it writes, train as one process does."""

from __future__ import annotations

import re

import pytest
from torch_schedules import dump

from schedgen.cli import main as schedgen

NAMES = ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@pytest.fixture(scope="module")
def runs(several, text, tmp_path_factory) -> dict[str, tuple[int, str]]:
    folder, cases = tmp_path_factory.mktemp("torch"), {}
    for name in NAMES:
        file = folder / f"{name}.json"
        assert schedgen(["compile", str(dump(name, 4, 8, folder)), "-o", str(file)]) == 0
        cases[name] = [
            file,
            "--model",
            "mpirun.models.mlp:tiny",
            "--text",
            text,
            "--steps",
            2,
            "--canonical",
            "--verify",
        ]
    return dict(zip(cases, several(4, list(cases.values())), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_the_bits_of_one_process(name, runs):
    code, out = runs[name]
    assert code == 0, out
    assert re.findall(r"^verify: (\w+) differ from one process by at most 0$", out, re.M) == [
        "losses",
        "gradients",
        "parameters",
    ], out
