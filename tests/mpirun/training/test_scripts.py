"""Scripts run: benchmarks of an Engine, and a training script that is moved to ranks in three ways."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_the_benchmark_of_a_script_s_loop_runs(launch):
    done = launch(4, "--quick", program=(str(BENCH / "engine.py"),))
    timed = re.findall(r"\d s +\d+\.\d+(?:  \d+\.\d+ to \d+\.\d+)?$", done.out, re.M)
    assert done.code == 0 and len(timed) == 6, done.err


@pytest.mark.parametrize("name", ["plain", "by_mpirun", "by_ddp", "by_pipelining"])
def test_a_script_trains_wherever_it_is_moved(name, tmp_path, launch):
    """One step on 2 ranks; losses begin where those of untrained bytes do."""
    script = str(BENCH / "moved" / f"{name}.py")
    if name in ("plain", "by_mpirun"):
        done = launch(2 if name == "by_mpirun" else None, script, 1, program=("-c", RUN.format(folder=str(tmp_path))))
        code, out, err = done.code, done.out, done.err
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run([*torchrun, script, "1"], cwd=tmp_path, capture_output=True, text=True, check=False)
        code, out, err = ended.returncode, ended.stdout, ended.stderr
    assert code == 0, err
    (loss,) = re.findall(r"^step 1: loss (.*)$", out, re.M)
    assert 5 < float(loss) < 10 and "test loss" in out
    assert list(tmp_path.glob("model*"))


RUN = """
import os, runpy, sys
os.chdir({folder!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_mpirun_asks_for_the_fewest_new_lines():
    def added(name: str) -> int:
        plain, moved = ((BENCH / "moved" / f"{n}.py").read_text().splitlines() for n in ("plain", name))
        return sum(line.startswith("+ ") for line in difflib.ndiff(plain, moved))

    lines = {name: added(name) for name in ("by_mpirun", "by_ddp", "by_pipelining")}
    assert min(lines, key=lines.get) == "by_mpirun", lines
