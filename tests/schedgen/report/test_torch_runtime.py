"""torch's own pipeline runtime executes the lists that are written for it, and computes mpirun's gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from processes import environment, mpiexec
from torch_schedules import deferred_receives

TESTS = Path(__file__).parents[2]
REPORTED = TESTS / "data" / "torch-172668.csv"
SIZES = ("--stages", 4, "--workers", 2, "--microbatches", 8)


def same_gradients(pairs, ranks, folder):
    """The differences of gradients by list, as `torch_runtime.py` prints them."""
    words = [f"{schedule}={path}" for schedule, path in pairs]
    script = TESTS / "helpers" / "torch_runtime.py"
    command = [*mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", str(script), str(folder / "meet"), *words]
    more = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(str(folder), more), check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_ranks_of_torch_compute_mpiruns_gradients_to_the_bit(run, tmp_path, warm_ranks):
    pairs = []
    for name, command in {
        "zb-v": ("compile", "zb-v", "--prefetch", 0, *SIZES),
        "dualpipe-v": ("compile", "dualpipe-v", *SIZES),
        "hanayo": ("compile", "hanayo", *SIZES),
        "found": ("search", "v-half", "--cost", "F=3,I=4,W=2", "--budget", 1, *SIZES),
        "172668": ("compile", REPORTED),
        "repaired": ("repair", deferred_receives(REPORTED, tmp_path / "deferred.csv"), "--transport", "in-order:pair"),
    }.items():
        schedule = tmp_path / f"{name}.json"
        assert run(*command, "-o", schedule).code == 0
        for form, path in (("torch", tmp_path / f"{name}.csv"), ("torch-jobs", tmp_path / f"{name}-jobs.csv")):
            assert run("export", schedule, "--to", form, "-o", path).code == 0
            pairs.append((schedule, path))
    pairs.append((tmp_path / "172668.json", REPORTED))  # as torch's users reported it
    differences = same_gradients(pairs, 2, tmp_path)
    assert differences == dict.fromkeys((path.name for _, path in pairs), 0.0)
