"""make bench-run: seconds of a training step, mpirun against torch's parallelisms and against a loop written by hand.

Two ranks of one thread on the CPU, or as many as a pair says; peers.py does the steps of both sides in
turns, in the same processes. The ratio is the median over pairs of steps, with
the quartiles of these ratios, `best` that of the fastest steps. Losses of the
first steps have to agree, or nothing is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ranks import ended, mpi, schedgen
from sizes import CASES

HERE = Path(__file__).parent
LIMIT = 300  # seconds a launch may take
AGREE = 1e-4  # relative difference of losses


class Pair(NamedTuple):
    peer: str  # a name in peers.PEERS
    about: str
    scheme: str
    stages: int
    target: dict[str, float]  # by case: our time should be at most this fraction of theirs
    options: tuple[str, ...] = ()  # of schedgen compile
    ranks: int = 2
    best_stages: Mapping[str, int] = {}  # by case, where another number of stages is faster: what a user would choose


WIDTHS = ("d48", "d128", "d384")
ONE_STAGE = dict.fromkeys(WIDTHS, 1)  # with a core per rank, overlapping sums with backwards costs more than it hides
PAIRS = {
    "1f1b": Pair(
        "1f1b", "pipelining.Schedule1F1B", "1f1b", 2,
        {"compute": 0.93, "overhead": 0.75, "d48": 0.55, "d128": 0.93, "d384": 0.95},
    ),
    "ddp": Pair(
        "ddp", "DistributedDataParallel", "ddp", 2, {"compute": 0.90, "overhead": 0.90} | dict.fromkeys(WIDTHS, 0.95),
        best_stages=ONE_STAGE,
    ),
    "fsdp": Pair(
        "fsdp", "FSDP2", "fsdp", 4,
        {"compute": 0.55, "overhead": 0.55, "d48": 0.30, "d128": 0.40, "d384": 0.60},
    ),
    "fsdp-shards": Pair(
        "fsdp", "FSDP2; ours has half of each of two stages a rank", "fsdp", 2, {},
        ("--shards", "2", "--weight-slots", "1"),
    ),
    "floor": Pair("floor", "1F1B by hand, mpi4py", "1f1b", 2, dict.fromkeys(CASES, 1.02)),
    "flat": Pair(
        "flat", "data parallel by hand, one flat sum", "ddp", 2, {"d48": 1.02, "d128": 1.02, "d384": 0.99},
        best_stages=ONE_STAGE,
    ),
    "one-rank": Pair("flat", "a plain loop on one rank", "ddp", 1, {"d48": 1.02, "d128": 1.01, "d384": 1.01}, (), 1),
}  # fmt: skip


def launch(case: str, pair: Pair, steps: int, seed: int, more: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """The results of peers.py for one pair; `more`: options for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    stages = pair.best_stages.get(case, pair.stages)
    sizes = ["--stages", str(stages), "--microbatches", str(CASES[case].microbatches)]
    with tempfile.TemporaryDirectory() as folder:
        schedule = str(Path(folder) / "schedule.json")
        schedgen("compile", pair.scheme, *sizes, "--workers", pair.ranks, *pair.options, "-o", schedule)
        command = [*mpi(pair.ranks), "-m", "mpi4py", "peers.py", pair.peer, schedule, "--model", f"cases:{case}"]
        command += [*sizes, "--steps", str(steps), "--seed", str(seed), "--meet", str(Path(folder) / "meet")]
        command += more
        done = ended(command, LIMIT, HERE, environment)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    for step, (a, b) in enumerate(zip(found["ours"]["losses"], found["theirs"]["losses"], strict=True)):
        if abs(a - b) > AGREE * abs(b):
            raise SystemExit(f"the losses of step {step} differ, ours {a} and theirs {b}: not the same training")
    return found


def measure(case: str, name: str, options: argparse.Namespace) -> None:
    pair, ours, theirs = PAIRS[name], [], []
    more = ["--device", options.device, *["--graphs"] * options.graphs]
    for number in range(options.rounds):
        found = launch(case, pair, options.steps or CASES[case].steps, options.seed + number, more)
        ours += found["ours"]["seconds"]
        theirs += found["theirs"]["seconds"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    target = f"{pair.target[case]:.2f}" if case in pair.target else "-"
    stages = f"; stages of ours: {pair.best_stages[case]}" if case in pair.best_stages else ""
    print(
        f"{case:9} {name:13} {1e3 * statistics.median(ours):8.2f} {1e3 * statistics.median(theirs):8.2f}   "
        f"{middle:6.3f}  {low:.3f} to {high:.3f}  {min(ours) / min(theirs):.3f} {target:>7}  {pair.about}{stages}",
        flush=True,
    )
    if "--shards" in pair.options:
        owned = [" ".join(f"{size / 1e6:.2f}" for size in found[side]["weights"]) for side in ("ours", "theirs")]
        print(f"{'':23} MB of weights that each rank owns: ours {owned[0]}, theirs {owned[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["compute", "overhead"])
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=3, help="launches of each pair; default: 3")
    parser.add_argument("--steps", type=int, help="timed steps of a launch; default: the case's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: only pairs of one rank")
    parser.add_argument("--graphs", action="store_true", help="mpirun replays its jobs as graphs, on a GPU")
    parser.add_argument("--quick", action="store_true", help="two pairs, once, two steps: whether it runs at all")
    options = parser.parse_args()
    if several := [name for name in options.pairs if PAIRS[name].ranks > 1 and options.device == "cuda"]:
        parser.error(f"--device cuda: {several[0]} has ranks that would need a GPU each")
    if options.quick:
        options.cases, options.pairs, options.rounds = ["quick"], ["fsdp-shards", "floor"], 1
    for case in options.cases:
        c = CASES[case]
        print(
            f"{case}: GPT blocks d={c.width}, T={c.length}, {c.microbatches} microbatches of "
            f"{c.sequences}, {options.rounds} times {options.steps or c.steps} pairs of steps"
        )
    print(f"{'case':9} {'pair':13} {'ours ms':>8} {'theirs':>8}   {'ratio':>6}  {'quartiles':14}  best   target")
    for case in options.cases:
        for name in options.pairs:
            measure(case, name, options)


if __name__ == "__main__":
    main()
