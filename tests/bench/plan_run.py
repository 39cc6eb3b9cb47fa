"""make bench-run: what `schedgen plan` writes for a model that is uneven, beside an even cut of it, in one run.

The last two of its eight blocks are four times as heavy. Every round profiles
it layer by layer, plans, and trains by the plan's schedule and by 1F1B with as
many layers on every rank; seconds of a step, one thread a rank.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cases import LAYERS
from run import mpi

HERE = Path(__file__).parent
MODEL = ["--model", "cases:uneven", "--threads", "1"]
ROUNDS, STEPS, MICROBATCHES = 3, 10, 16


class Round(NamedTuple):
    """Seconds of a step."""

    scheme: str
    predicted: float
    planned: float
    even: float


def one_round(ranks: int, folder: Path) -> Round:
    call = partial(subprocess.run, check=True, cwd=HERE, capture_output=True, text=True)
    schedgen = [sys.executable, "-m", "schedgen"]
    profile, plan, even, metrics = (str(folder / name) for name in ("profile", "plan", "even", "metrics"))
    sizes = ["--microbatches", str(MICROBATCHES)]
    call([*mpi(ranks), "-m", "mpirun", "profile", *MODEL, "--stages", str(LAYERS), "-o", profile])
    found = call([*schedgen, "plan", profile, "--workers", str(ranks), *sizes, "--json", "-o", plan])
    call([*schedgen, "compile", "1f1b", "--stages", str(ranks), *sizes, "-o", even])

    def measured(schedule: str) -> float:
        call([*mpi(ranks), "-m", "mpirun", schedule, *MODEL, "--steps", str(STEPS), "--metrics", metrics])
        rows = [json.loads(line)["seconds"] for line in Path(metrics).read_text().splitlines()]
        return statistics.median(rows[2:])

    best = json.loads(found.stdout)["schedules"][0]
    words = f"{best['scheme']} x {best['replicas']}, {'-'.join(map(str, best['layers']))} layers"
    return Round(words, best["step_time"], measured(plan), measured(even))


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    print("ms a step; ratios: median (least to greatest) of rounds")
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            rounds = [one_round(ranks, Path(folder)) for _ in range(ROUNDS)]
        predicted, planned, even = (
            1e3 * statistics.median(getattr(one, what) for one in rounds) for what in ("predicted", "planned", "even")
        )
        print(f"  {ranks} ranks: {', '.join(sorted({one.scheme for one in rounds}))}")
        print(f"    predicted {predicted:.1f}, measured {planned:.1f}, measured / predicted "
              f"{spread([one.planned / one.predicted for one in rounds])}")  # fmt: skip
        print(f"    even 1f1b {even:.1f}, even / planned {spread([one.even / one.planned for one in rounds])}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
