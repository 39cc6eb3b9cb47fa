"""make bench-run: the schedules that `schedgen plan` writes for an uneven model, against an even cut of the model.

The last two of its eight layers are four times as heavy as the others, and so
is one of four stages with two layers each. Every round profiles it layer by
layer, plans among all schemes and among pipelines of 1F1B, and trains by both
plans and by 1F1B with as many layers on every rank; seconds of a step, one
thread per rank.
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

from ranks import mpi, schedgen
from sizes import LAYERED

HERE = Path(__file__).parent
QUICK = "--quick" in sys.argv
NAME = "quick_layers" if QUICK else "uneven"
LAYERS = len(LAYERED[NAME].blocks)
ROUNDS, STEPS, MICROBATCHES = (1, 3, 2) if QUICK else (3, 10, 16)
MODEL = ["--model", f"cases:{NAME}", "--threads", "1", "--steps", str(STEPS)]


class Plan(NamedTuple):
    """A schedule that plan wrote, and seconds of a step."""

    words: str
    predicted: float
    measured: float


class Round(NamedTuple):
    best: Plan
    pipeline: Plan
    even: float


def one_round(ranks: int, folder: Path) -> Round:
    call = partial(subprocess.run, check=True, cwd=HERE, capture_output=True, text=True)
    profile, plan, even, metrics = (str(folder / name) for name in ("profile", "plan", "even", "metrics"))
    sizes = ["--microbatches", MICROBATCHES]
    call([*mpi(ranks), "-m", "mpirun", "profile", *MODEL, "--stages", str(LAYERS), "-o", profile])
    schedgen("compile", "1f1b", "--stages", ranks, *sizes, "-o", even)

    def measured(schedule: str) -> float:
        call([*mpi(ranks), "-m", "mpirun", schedule, *MODEL, "--metrics", metrics])
        rows = [json.loads(line)["seconds"] for line in Path(metrics).read_text().splitlines()]
        return statistics.median(rows[2:])

    def planned(*only: str) -> Plan:
        found = schedgen("plan", profile, "--workers", ranks, *sizes, *only, "--json", "-o", plan)
        best = json.loads(found)["schedules"][0]
        words = f"{best['scheme']} x {best['replicas']}, {'-'.join(map(str, best['layers']))} layers"
        return Plan(words, best["step_time"], measured(plan))

    pipeline = planned("--schemes", "1f1b")
    return Round(pipeline if QUICK else planned(), pipeline, measured(even))


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    print("ms a step; ratios: median (least to greatest) of rounds")
    for ranks in (2,) if QUICK else (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            rounds = [one_round(ranks, Path(folder)) for _ in range(ROUNDS)]
        print(f"  {ranks} ranks, even 1f1b {1e3 * statistics.median(one.even for one in rounds):.1f}")
        for name in ("best", "pipeline"):
            plans = [getattr(one, name) for one in rounds]
            predicted, measured = (1e3 * statistics.median(plan[k] for plan in plans) for k in (1, 2))
            print(f"    {name}: {'; '.join(sorted({plan.words for plan in plans}))}")
            print(f"      predicted {predicted:.1f}, measured {measured:.1f}: measured / predicted "
                  f"{spread([plan.measured / plan.predicted for plan in plans])}, even / measured "
                  f"{spread([one.even / plan.measured for one, plan in zip(rounds, plans, strict=True)])}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
