"""Every benchmark runs, in its quick size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples import further

BENCH = Path(__file__).parents[2] / "bench"
PARTS = {"cases", "floor", "peers", "ranks", "sizes"}  # used by other benchmarks
OTHERS = sorted({path.stem for path in BENCH.glob("*.py")} - PARTS - {"run"})


@pytest.mark.parametrize("name", ["run", *further(*OTHERS)])
def test_a_benchmark_runs(name, tmp_path, launch):
    """Whether it ends well, not what it measures."""
    arguments = [tmp_path / "out.svg"] if name == "updates" else []
    done = launch(None, *arguments, "--quick", program=(str(BENCH / f"{name}.py"),))
    assert done.code == 0 and done.out, done.err
    assert "Traceback" not in done.err


def test_a_benchmark_keeps_a_line_for_each_commit(tmp_path, launch):
    file = tmp_path / "history.txt"
    file.write_text("a line\n")
    assert launch(None, "--history", file, "--quick", program=(str(BENCH / "compile.py"),)).code == 0
    assert re.fullmatch(r"a line\n\d{4}-\d\d-\d\d \S+( +[\d,]+){4}\n", file.read_text())
