"""slurm.sbatch: when a job is requeued. Stand-ins for Slurm's commands report how a job ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from processes import ROOT

COMMANDS = {
    "srun": 'exit "$CODE"',
    "scontrol": 'if [ "$1" = show ]; then echo "PreemptTime=$PREEMPTED"; else echo "$@"; fi',
}


@pytest.fixture
def job(tmp_path: Path):
    """Runs slurm.sbatch with some arguments and variables of a job."""
    for name, line in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    always = {"PATH": path, "VENV": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}

    def job(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", ROOT / "mpirun" / "cli" / "slurm.sbatch", "1f1b.json", *arguments]
        return subprocess.run(command, env=always | variables, capture_output=True, text=True, check=False)

    return job


@pytest.mark.parametrize(
    ("code", "preempted", "arguments", "requeued"),
    [
        ("143", "2026-01-01T00:00:00", ["--save", "a", "--resume", "a"], True),
        ("143", "2026-01-01T00:00:00", ["--save", "a", "--resume=a"], True),
        ("0", "2026-01-01T00:00:00", ["--save", "a", "--resume", "a"], False),
        ("1", "None", ["--save", "a", "--resume", "a"], False),
        ("143", "2026-01-01T00:00:00", ["--save", "a"], False),
    ],
    ids=["pre-empted", "pre-empted, with =", "done", "failed", "would begin again"],
)
def test_a_job_that_can_go_on_is_requeued(job, code, preempted, arguments, requeued):
    done = job(*arguments, CODE=code, PREEMPTED=preempted)
    assert (done.returncode, done.stdout) == (int(code), "requeue 7\n" if requeued else "")
    assert ("it is not requeued" in done.stderr) == (arguments == ["--save", "a"])


def test_without_its_venv_a_job_does_not_begin(job):
    done = job(CODE="0", PREEMPTED="None", VENV="nowhere")
    assert done.returncode != 0 and "nowhere/bin/activate" in done.stderr
