"""Scripts run: benchmarks of an Engine, and a training script that is moved to ranks in three ways."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("example", "words"), [("finetune_lm", ["model"]), ("digits", ["1.json", "x"]), ("byte_lm", [])]
)
def test_an_example_says_how_it_is_used(in_one_launch, example, words):
    ((code, _, err),) = in_one_launch(1, [[f"mpirun.examples.{example}", *words]])
    assert code == 2 and re.search("^usage: ", err, re.M) and "Traceback" not in err


def test_the_benchmark_of_a_script_s_loop_runs(launch):
    done = launch(4, "--quick", program=(str(BENCH / "engine.py"),))
    timed = re.findall(r"\d s +\d+\.\d+(?:  \d+\.\d+ to \d+\.\d+)?$", done.out, re.M)
    assert done.code == 0 and len(timed) == 6, done.err


@pytest.mark.parametrize("name", ["plain", "by_mpirun", "by_ddp", "by_pipelining"])
def test_a_script_trains_wherever_it_is_moved(name, tmp_path, launch):
    """One step on 2 ranks; the first loss is that of an untrained model of bytes."""
    script, program = str(BENCH / "moved" / f"{name}.py"), RUN.format(folder=str(tmp_path))
    if name in ("by_ddp", "by_pipelining"):
        program = LIKE_TORCHRUN + program
    done = launch(None if name == "plain" else 2, script, 1, program=("-c", program))
    assert done.code == 0, done.err
    (loss,) = re.findall(r"^step 1: loss (.*)$", done.out, re.M)
    assert 5 < float(loss) < 10 and "test loss" in done.out
    assert list(tmp_path.glob("model*"))


RUN = """
import os, runpy, sys
os.chdir({folder!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Sets the variables that torchrun sets, without its three processes that import torch; as there, the store stays open
# from the moment that its port is known, so that no other program takes the port.
LIKE_TORCHRUN = """
import os
from mpi4py import MPI
from torch.distributed import TCPStore
rank, size, host = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, "127.0.0.1"
store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
port = MPI.COMM_WORLD.bcast(store and store.port)
os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=host, MASTER_PORT=str(port),
                   TORCHELASTIC_USE_AGENT_STORE="True")
"""


def test_mpirun_asks_for_the_fewest_new_lines():
    def added(name: str) -> int:
        plain, moved = ((BENCH / "moved" / f"{n}.py").read_text().splitlines() for n in ("plain", name))
        return sum(line.startswith("+ ") for line in difflib.ndiff(plain, moved))

    lines = {name: added(name) for name in ("by_mpirun", "by_ddp", "by_pipelining")}
    assert min(lines, key=lines.get) == "by_mpirun", lines
