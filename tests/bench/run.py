"""make bench-run: seconds of a training step, mpirun beside torch's parallelisms and beside a loop written by hand.

Two ranks of one thread on the CPU, the same model, microbatches and optimizer
for both of a pair. A round launches ours and theirs one after the other; the
ratio is that of the medians over the steps of the two launches, and the table
shows the median, least and greatest ratio over the rounds. `best` is the ratio
of the fastest steps of all rounds, `others` the cores that other processes of
the machine used at most. Ours is the CLI as users run it. Losses of the first
steps have to agree, or nothing is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from cases import CASES

HERE = Path(__file__).parent
RANKS = 2
WARM = 3  # steps before the timed ones
LIMIT = 300  # seconds a launch may take
AGREE = 1e-4  # relative difference of losses


class Pair(NamedTuple):
    peer: str  # a name in peers.PEERS
    about: str
    scheme: str
    stages: int
    target: dict[str, float]  # by case: ours should take this part of their time, at most
    options: tuple[str, ...] = ()  # of schedgen compile


PAIRS = {
    "1f1b": Pair("1f1b", "pipelining.Schedule1F1B", "1f1b", 2, {"compute": 0.93, "overhead": 0.75}),
    "interleaved": Pair(
        "interleaved-1f1b",
        "pipelining.ScheduleInterleaved1F1B",
        "interleaved-1f1b",
        4,
        {"compute": 0.93, "overhead": 0.75},
    ),
    "ddp": Pair("ddp", "DistributedDataParallel", "ddp", 4, {"compute": 0.90, "overhead": 0.90}),
    "fsdp": Pair("fsdp", "FSDP2", "fsdp", 4, {"compute": 0.55, "overhead": 0.55}),
    "fsdp-lean": Pair(
        "fsdp", "FSDP2; ours holds one foreign stage", "fsdp", 4, {"compute": 0.55, "overhead": 0.55},
        ("--weight-slots", "1"),
    ),
    "fsdp-keep": Pair("fsdp-keep", "FSDP2 that gathers once a step", "fsdp", 4, {}),
    "floor": Pair("floor", "1F1B by hand, mpi4py", "1f1b", 2, {"compute": 1.03, "overhead": 1.03}),
}  # fmt: skip


class Timing(NamedTuple):
    seconds: float  # of a step, median
    best: float  # of the fastest step
    losses: list[float]  # of the first steps
    others: float  # cores that other processes used meanwhile


def launch(arguments: list[str], metrics: Path) -> Timing:
    """Run two ranks of `python ARGUMENTS`, and read what rank 0 says of each step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    command = [*mpi(RANKS), *arguments]
    busy, own, begin = machine_busy(), children(), time.perf_counter()
    try:
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{shlex.join(command)} took more than {LIMIT} s") from None
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    others = max(0.0, (machine_busy() - busy) - (children() - own)) / seconds
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    laps = [row["seconds"] for row in rows[WARM:]]
    return Timing(statistics.median(laps), min(laps), [row["loss"] for row in rows[:WARM]], others)


def mpi(ranks: int) -> list[str]:
    """What launches Python on so many ranks."""
    mpiexec = shlex.split(os.environ.get("MPIEXEC", str(Path(sys.executable).with_name("mpiexec"))))
    return [*mpiexec, "-n", str(ranks), sys.executable]


def machine_busy() -> float:
    """Seconds that all cores of this machine have worked, for anybody; 0 where it does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, *rest = map(int, stat.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(cores: float, patience: float) -> None:
    """Return once others used no more than so many cores for two seconds, or patience has run out."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        busy, begin = machine_busy(), time.monotonic()
        time.sleep(2)
        if machine_busy() - busy <= cores * (time.monotonic() - begin):
            return


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Bench:
    def __init__(self, folder: Path, case: str, pair: Pair, seed: int) -> None:
        self.folder, self.case, self.pair = folder, CASES[case], pair
        schedule = folder / "schedule.json"
        sizes = ["--stages", pair.stages, "--microbatches", self.case.microbatches, "--workers", RANKS]
        subprocess.run(
            [sys.executable, "-m", "schedgen", "compile", pair.scheme, *map(str, sizes), *pair.options, "-o", schedule],
            check=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        )
        self.common = ["--model", f"cases:{case}", "--steps", str(WARM + self.case.steps), "--seed", str(seed)]

    def ours(self) -> Timing:
        metrics = self.folder / "ours.jsonl"
        extra = ["--threads", "1", "--optimizer", "adamw", "--metrics", str(metrics)]
        return launch(["-m", "mpirun", str(self.folder / "schedule.json"), *self.common, *extra], metrics)

    def theirs(self) -> Timing:
        metrics, meet = self.folder / "theirs.jsonl", self.folder / "meet"
        meet.unlink(missing_ok=True)
        sizes = ["--stages", str(self.pair.stages), "--microbatches", str(self.case.microbatches)]
        extra = [*sizes, "--metrics", str(metrics), "--meet", str(meet)]
        return launch(["-m", "mpi4py", "peers.py", self.pair.peer, *self.common, *extra], metrics)

    def round(self, number: int) -> tuple[Timing, Timing]:
        """Ours and theirs; who goes first changes from round to round."""
        if number % 2:
            theirs = self.theirs()
            ours = self.ours()
        else:
            ours = self.ours()
            theirs = self.theirs()
        for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
            if abs(a - b) > AGREE * abs(b):
                raise SystemExit(f"the losses of step {step} differ, ours {a} and theirs {b}: not the same training")
        return ours, theirs


def measure(case: str, name: str, options: argparse.Namespace) -> None:
    pair = PAIRS[name]
    found: list[tuple[Timing, Timing]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), case, pair, options.seed)
        for number in range(options.rounds):
            for _ in range(options.retries + 1):
                wait_for_quiet(options.quiet, options.patience)
                laps = bench.round(number)
                if max(lap.others for lap in laps) <= options.quiet:
                    break
            found.append(laps)
    ratios = [ours.seconds / theirs.seconds for ours, theirs in found]
    ours, theirs = (1e3 * statistics.median(laps[side].seconds for laps in found) for side in (0, 1))
    best = min(laps[0].best for laps in found) / min(laps[1].best for laps in found)
    target = f"{pair.target[case]:.2f}" if case in pair.target else "-"
    others = max(lap.others for laps in found for lap in laps)
    print(
        f"{case:9} {name:12} {ours:8.2f} {theirs:8.2f}   {statistics.median(ratios):6.3f}  {min(ratios):.3f} to "
        f"{max(ratios):.3f}  {best:.3f} {target:>7} {others:7.2f}  {pair.about}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=0.1, help="cores others may use, or a round is done again")
    parser.add_argument("--retries", type=int, default=2, help="how often a round is done again; default: 2")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for quiet before a round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for case in options.cases:
        c = CASES[case]
        print(
            f"{case}: {RANKS} ranks, GPT blocks d={c.width}, T={c.length}, {c.microbatches} microbatches of "
            f"{c.sequences}, median of {c.steps} steps"
        )
    print(f"{'case':9} {'pair':12} {'ours ms':>8} {'theirs':>8}   {'ratio':>6}  {'spread':14}   best  target  others")
    for case in options.cases:
        for name in options.pairs:
            measure(case, name, options)


if __name__ == "__main__":
    main()
