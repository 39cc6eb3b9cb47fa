"""make curves: the loss of a GPT under PipeDream's three kinds of update, on one text and in one picture.

Four ranks, the same microbatches in the same order: with stashed weight
versions, with vertical sync, and with a flush, which updates once in eight
microbatches. `python updates.py OUT.svg [--quick]`; the numbers go to standard output.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from ranks import mpi, schedgen

SCHEDULES = {
    "pipedream": ["pipedream"],
    "pipedream, vertical sync": ["pipedream", "--updates", "vertical"],
    "pipedream-flush": ["1f1b"],
}
QUICK = "--quick" in sys.argv
STAGES, MICROBATCHES, STEPS = (2, 2, 2) if QUICK else (4, 8, 200)
RUN = ["--model", "mpirun.examples.gpt:tiny", "--steps", str(STEPS), "--lr", "5e-4", "--warmup", "5"]


def losses(scheme: list[str], folder: Path) -> list[float]:
    """The loss of every step, the mean over its microbatches."""
    call = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    schedule, metrics = folder / "schedule.json", folder / "metrics.jsonl"
    schedgen("compile", *scheme, "--stages", STAGES, "--microbatches", MICROBATCHES, "-o", schedule)
    call([*mpi(STAGES), "-m", "mpirun", str(schedule), *RUN, "--metrics", str(metrics)])
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def picture(curves: dict[str, list[float]], out: str) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "schedgen", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for name, values in curves.items():
            axes.plot([MICROBATCHES * (step + 1) for step in range(STEPS)], values, label=name, linewidth=1)
        axes.set_xlabel("microbatches of 4 x 64 bytes")
        axes.set_ylabel("loss, nats a byte")
        axes.grid(color="0.9")
        axes.legend()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            name: losses(scheme, Path(folder))
            for name, scheme in list(SCHEDULES.items())[: 1 if "--quick" in sys.argv else None]
        }
    places = sorted({min(at, STEPS) for at in (10, 50, 100, STEPS)})
    print("loss, the mean of the ten steps up to microbatch " + ", ".join(str(MICROBATCHES * at) for at in places))
    for name, values in curves.items():
        print(f"  {name:26}" + "".join(f"{statistics.mean(values[max(0, at - 10) : at]):8.4f}" for at in places))
    picture(curves, sys.argv[1])


if __name__ == "__main__":
    main()
