"""Schedules that come from elsewhere train as one process does: torch's own, by the CSV it writes, and `new`'s."""

from __future__ import annotations

import re

import pytest
from torch_schedules import dump

from schedgen.cli.main import main as schedgen

TORCH = ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@pytest.fixture(scope="module")
def runs(several, text, tmp_path_factory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("sources")
    assert schedgen(["new", str(folder / "mine")]) == 0
    sources = {name: [dump(name, 4, 8, folder)] for name in TORCH}
    sources["mine"] = [folder / "mine.py", "--stages", 8, "--microbatches", 6, "--workers", 4]
    cases = {}
    for name, source in sources.items():
        file = folder / f"{name}.json"
        assert schedgen(["compile", *map(str, source), "-o", str(file)]) == 0
        model = ("--model", "mpirun.examples.mlp:tiny", "--text", text)
        cases[name] = [file, *model, "--steps", 2, "--canonical", "--verify"]
    return dict(zip(cases, several(4, list(cases.values())), strict=True))


@pytest.mark.parametrize("name", [*TORCH, "mine"])
def test_it_gives_the_bits_of_one_process(name, runs):
    code, out = runs[name]
    assert code == 0, out
    exact = re.findall(r"^verify: (\w+) differ from one process by at most 0$", out, re.M)
    assert exact == ["losses", "gradients", "parameters"], out
