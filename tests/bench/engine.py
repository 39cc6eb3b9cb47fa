"""The cost of a script's loop against the command line, of a slow dataset, and of evaluation, on 4 ranks by 1F1B.

    mpiexec -n 4 python tests/bench/engine.py [--quick]

All in one run, in turns: medians of the seconds, and of the ratios, with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils.data import Dataset

import mpirun
import schedgen
from mpirun.cli.options import run_options
from mpirun.cli.run import Run
from mpirun.examples.gpt import gpt
from schedgen.schemes import load

QUICK = "--quick" in sys.argv
WORLD, MICROBATCHES, LENGTH, SEQUENCES = MPI.COMM_WORLD, 8, 64, 4
SLEEP, WORKERS, WIDTH, BLOCKS = (0.005, 1, 16, 2) if QUICK else (0.05, 2, 128, 10)


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Random bytes; a microbatch takes `seconds` to load."""

    def __init__(self, samples: int, seconds: float = 0.0) -> None:
        self.bytes = torch.randint(0, 256, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds / SEQUENCES)
        return self.bytes[index, :-1], self.bytes[index, 1:]


def model(stages: int) -> mpirun.Model:
    """2 million parameters."""
    return gpt(stages, blocks=BLOCKS, width=WIDTH, heads=4, length=LENGTH, sequences=SEQUENCES)


def timed(call: Any) -> float:
    """Seconds of a collective call, from when all ranks begin."""
    WORLD.Barrier()
    begin = time.perf_counter()
    call()
    WORLD.Barrier()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: whether it runs at all")
    parser.parse_args()
    rounds, batches = (2, 2) if QUICK else (20, 50)
    folder = TemporaryDirectory() if WORLD.rank == 0 else None
    file = Path(WORLD.bcast(folder.name if folder else None), "1f1b.json")
    if WORLD.rank == 0:
        sizes = schedgen.Sizes(4, MICROBATCHES, 4)
        with file.open("wb") as out:
            schedgen.write(schedgen.compile(load("1f1b", sizes), sizes), out)
    WORLD.Barrier()
    command = Run(WORLD, run_options(WORLD, [str(file), "--model", f"{__name__}:model", "--timeout", "0"]))
    run = mpirun.Engine(str(file), model, timeout=0)
    kinds = ((0.0, 0), (0.0, WORKERS), (SLEEP, WORKERS))
    loaders = [run.loader(Pieces(320, seconds), SEQUENCES, workers=workers) for seconds, workers in kinds]
    by_script, by_workers, by_slow = (iter_forever(loader) for loader in loaders)
    seconds: dict[str, list[float]] = {"command": [], "script": [], "workers": [], "slow": []}
    for number in range(rounds):
        steps = {
            "command": command.engine.step,
            "script": lambda: run.step(next(by_script)),
            "workers": lambda: run.step(next(by_workers)),
            "slow": lambda: run.step(next(by_slow)),
        }
        for name, step in steps.items():
            spent = timed(step)
            seconds[name] += [spent] * (number > 1 or QUICK)
    evaluation = run.loader(Pieces(SEQUENCES * MICROBATCHES * batches), SEQUENCES)
    run.evaluate(evaluation, batches=1)  # prepares the list of forwards
    evaluating = timed(lambda: run.evaluate(evaluation))
    training = timed(lambda: [run.step(batch) for batch in evaluation])
    if WORLD.rank == 0:
        for what, name, beside in [
            ("a step by the command line", "command", "command"),
            ("a step by run.step", "script", "command"),
            (f"with {WORKERS} processes that load, on each rank", "workers", "command"),
            (f"and {SLEEP * 1e3:.0f} ms of loading a microbatch", "slow", "workers"),
        ]:
            ratios = [a / b for a, b in zip(seconds[name], seconds[beside], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            print(f"{what:40} {statistics.median(seconds[name]):8.3f} s   {middle:.3f}  {low:.3f} to {high:.3f}")
        for what, spent in (("training", training), ("evaluation", evaluating)):
            print(f"{f'{what} on {batches} batches':40} {spent:8.3f} s   {spent / training:.3f}")


def iter_forever(loader: Any) -> Any:
    """Epoch after epoch."""
    while True:
        yield from loader


if __name__ == "__main__":
    main()
