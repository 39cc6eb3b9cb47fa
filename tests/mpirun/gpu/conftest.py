"""Fixtures of the checks on a GPU, and the table of their results, which goes to the file that $GPU_SUMMARY names."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all checks without a GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write a line per check: its outcome, and what it measured or why it was skipped."""
    if not (file := os.environ.get("GPU_SUMMARY")) or hasattr(terminalreporter.config, "workerinput"):
        return
    lines = []
    for outcome in OUTCOMES:
        for report in terminalreporter.getreports(outcome):
            if outcome == "passed" and report.when != "call":
                continue
            check = report.nodeid.partition("::test_")[2].replace("_", " ")
            figures = ", ".join(f"{name} {value}" for name, value in report.user_properties)
            reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            lines.append(f"{outcome:8}{report.duration:7.1f} s  {check:76}{figures}{reason}".rstrip())
    with Path(file).open("a") as table:
        table.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def passes(launch: Callable[..., Any], traces: Path) -> Callable[..., str]:
    """Runs mpirun, by default by 1f1b on 4 ranks, asserts that it succeeds, and returns its stdout."""

    def passes(*options: object, schedule: str | Path = "1f1b", ranks: int = 4, **how: Any) -> str:
        file = traces / f"{schedule}.json" if isinstance(schedule, str) else schedule
        done = launch(ranks, file, *options, **{"program": ("-m", "mpirun")} | how)
        assert done.code == 0, done.out + done.err
        return done.out

    return passes


@pytest.fixture
def two_ranks(compiled: Callable[..., Path]) -> Path:
    """1F1B on 2 ranks."""
    return compiled("1f1b", stages=2, microbatches=8)


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of ranks whose kernels run on one GPU at the same time, by NVIDIA's Multi-Process Service."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("there is no nvidia-cuda-mps-control")
    service = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log")}
    for folder in service.values():
        Path(folder).mkdir()
    subprocess.run([control, "-d"], env=os.environ | service, check=True)
    yield service
    subprocess.run([control], input=b"quit\n", env=os.environ | service, check=True)


@pytest.fixture
def side_by_side(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of two ranks whose kernels run at the same time: on two GPUs, or by `mps` on one."""
    return {} if torch.cuda.device_count() > 1 else request.getfixturevalue("mps")
