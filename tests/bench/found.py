"""make bench-run: a found order against the best built-in one: `schedgen plan` with and without `--search`.

    python tests/bench/found.py [--rounds 3] [--steps 20] [--quick]

The model is a GPT whose last two of eight layers are four times as heavy as the others, on 2 ranks of one thread, each
with a memory limit. Every round profiles it, plans, and trains by both schedules in one launch, a step by each in turn.
It prints measured and predicted seconds, and the ratio of neighbouring steps with its quartiles. Other load on the
machine changes measured seconds, but not the CPU time of jobs: so both schedules are also simulated with the median CPU
time of each job in these steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ranks import mpi, schedgen
from sizes import LAYERED

from schedgen.ir.instructions import Op

HERE = Path(__file__).parent
RANKS, MICROBATCHES = 2, 8
QUICK = "--quick" in sys.argv
NAME = "quick_layers" if QUICK else "uneven"
OPS: dict[int, str] = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}
Jobs = dict[str, list[float]]  # CPU seconds, by direction and stage
MODEL = ["--model", f"cases:{NAME}", "--threads", "1"]


class Plan(NamedTuple):
    """What plan prints of the schedule that it writes."""

    words: str
    predicted: float
    bytes: int


def rank(schedules: Sequence[str], steps: int) -> None:
    """One rank: a step by each schedule in turn; rank 0 prints, as JSON, the seconds and the CPU seconds of jobs."""
    import torch
    from mpi4py import MPI

    from mpirun.cli.options import read_options
    from mpirun.cli.run import Run

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    runs = [
        Run(comm, read_options(comm, "", [name, *MODEL, "--timeout", "0"])).session.interpreter for name in schedules
    ]
    for each in runs:
        each.run(0)
        each.run(1)
    seconds: list[list[float]] = [[] for _ in runs]
    jobs: list[Jobs] = [{} for _ in runs]
    for each, found in zip(runs, jobs, strict=True):
        each.code = [
            timed(act, found.setdefault(f"{OPS[i.op]} {i.stage}", [])) if i.op in OPS else act
            for act, i in zip(each.code, each.context.instructions, strict=True)
        ]
    for number in range(2, 2 + steps):
        for each, laps in zip(runs, seconds, strict=True):
            comm.Barrier()
            begin = time.perf_counter()
            each.run(number)
            laps.append(comm.allreduce(time.perf_counter() - begin, MPI.MAX))
    medians = [{name: statistics.median(laps) for name, laps in found.items()} for found in jobs]
    costs = [by_stage(dict(ChainMap(*comm.allgather(mine)))) for mine in medians]
    if comm.rank == 0:
        print(json.dumps([seconds, costs]))


def by_stage(seconds: dict[str, float]) -> dict[str, list[float]]:
    """A profile, from the seconds of every direction and stage. Where a stage has no such jobs any time will do."""
    stages = range(sum(name.startswith("F ") for name in seconds))
    names = [name for name in OPS.values() if any(f"{name} {s}" in seconds for s in stages)]
    return {name: [seconds.get(f"{name} {s}", seconds[f"F {s}"]) for s in stages] for name in names}


def timed(act: Callable[[], object], laps: list[float]) -> Callable[[], None]:
    """`act`, whose CPU seconds are appended to `laps`."""

    def run() -> None:
        begin = time.thread_time()
        act()
        laps.append(time.thread_time() - begin)

    return run


def one_round(memory: float, budget: int, options: argparse.Namespace, folder: Path) -> None:
    """Profile, plan twice, measure, print."""
    call = partial(subprocess.run, check=True, cwd=HERE, capture_output=True, text=True)
    layers = len(LAYERED[NAME].blocks)
    profile = str(folder / "profile")
    how = ["--stages", str(layers), *["--steps", "1"] * QUICK]
    call([*mpi(RANKS), "-m", "mpirun", "profile", *MODEL, *how, "-o", profile])

    def planned(name: str, *more: str) -> Plan:
        sizes = ["--workers", str(RANKS), "--microbatches", str(MICROBATCHES), "--memory", str(memory)]
        sizes += ["--schemes", "1f1b"] * QUICK
        written = ["--json", "-o", str(folder / name)]
        best = json.loads(schedgen("plan", profile, *sizes, *more, *written))["schedules"][0]
        words = f"{best['scheme']}, order {best['order']}, {'-'.join(map(str, best['layers']))} layers"
        return Plan(words, best["step_time"], best["peak_bytes"])

    plans = [planned("built-in"), planned("found", "--search", str(budget))]
    files = [str(folder / name) for name in ("built-in", "found")]
    more = ["--steps", str(options.steps), *["--quick"] * QUICK]
    done = call([*mpi(RANKS), str(HERE / "found.py"), "--rank", *files, *more])
    (built_in, found), costs = json.loads(done.stdout)
    by_cpu = []
    for plan, seconds, file, cost in zip(plans, (built_in, found), files, costs, strict=True):
        (folder / "cost").write_text(json.dumps(cost))
        by_cpu.append(json.loads(schedgen("simulate", file, "--profile", folder / "cost", "--json"))["makespan"])
        what = f"{plan.words:52} {plan.bytes / 1e6:5.1f} MB   predicted {plan.predicted:.4f} s"
        print(f"  {what}, by CPU time {by_cpu[-1]:.4f}, measured {statistics.median(seconds):.4f}")
    ratios = [ours / theirs for ours, theirs in zip(found, built_in, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    predicted = plans[1].predicted / plans[0].predicted
    measured = f"measured {middle:.3f} ({low:.3f} to {high:.3f})"
    print(
        f"  found / built-in: predicted {predicted:.3f}, by CPU time {by_cpu[1] / by_cpu[0]:.3f}, {measured}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--memory", type=float, default=3.9e7, help="bytes a rank may hold")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: whether it runs at all")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps)
        return
    if options.quick:
        options.rounds, options.steps = 1, 2
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one_round(options.memory, 1 if options.quick else 30, options, Path(folder))


if __name__ == "__main__":
    main()
