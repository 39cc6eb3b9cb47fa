"""make bench-run: seconds of a step as `schedgen simulate` predicts them from `mpirun profile`, and as measured.

Two ranks of one thread, the compute-heavy GPT. Every round profiles, then
trains; the ratio is the median over rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from ranks import mpi, schedgen

HERE = Path(__file__).parent
QUICK = "--quick" in sys.argv
CASES = {"1f1b": 2} if QUICK else {"1f1b": 2, "gpipe": 2, "ddp": 2}  # stages
MODEL, ROUNDS, STEPS = ("cases:quick", 1, 3) if QUICK else ("cases:compute", 3, 10)


def main() -> None:
    call = partial(subprocess.run, check=True, cwd=HERE, capture_output=True, text=True)
    print("predicted and measured ms a step; ratio: median (least to greatest) of rounds")
    with tempfile.TemporaryDirectory() as folder:
        schedule, profile, metrics = (str(Path(folder) / name) for name in ("schedule", "profile", "metrics"))
        for scheme, stages in CASES.items():
            schedgen("compile", scheme, "--stages", stages, "--microbatches", 8, "--workers", 2, "-o", schedule)
            found: list[tuple[float, float]] = []
            for _ in range(ROUNDS):
                model = ["--model", MODEL, "--threads", "1", "--steps", str(STEPS)]
                call([*mpi(2), "-m", "mpirun", "profile", *model, "--schedule", schedule, "-o", profile])
                call([*mpi(2), "-m", "mpirun", schedule, *model, "--metrics", metrics])
                numbers = schedgen("simulate", schedule, "--profile", profile, "--json")
                rows = [json.loads(line)["seconds"] for line in Path(metrics).read_text().splitlines()]
                found.append((json.loads(numbers)["makespan"], statistics.median(rows[2:])))
            ratios = [measured / predicted for predicted, measured in found]
            predicted, measured = (1e3 * statistics.median(one[k] for one in found) for k in (0, 1))
            print(
                f"  {scheme:6} {predicted:7.1f} {measured:7.1f}   {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
