"""Our best schedule against torch's best parallelism: step time and memory, with and without a memory limit.

    python tests/bench/best.py [--ranks 2] [--rounds 3] [--models deep ...] [--quick]

Theirs are torch's GPipe, 1F1B, interleaved 1F1B, ZBV, DDP and FSDP2, of which the fastest that fits counts. Ours is the
schedule that `schedgen plan` writes from a profile of the model, given the same limit: none, 60 % and 40 % of DDP's
peak memory on a rank. In every round each contestant has a launch of its own, with one thread per rank. Memory is the
peak of the bytes of live tensors on a rank, in the second step, counted at every torch op. The losses of the first step
must agree, or nothing is reported. A launch that does not end within five minutes is ended and reported; what it had
measured counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ranks import ended, mpi, schedgen
from sizes import LAYERED

HERE = Path(__file__).parent
LIMITS = (None, 0.6, 0.4)  # of DDP's peak memory
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zbv": 2, "ddp": 1, "fsdp": 1}  # of each rank
TEXT = str(HERE.parents[1] / "LICENSE")  # a short text, since it is part of the counted memory
AGREE = 1e-4  # relative difference of losses
LIMIT = 300  # seconds of a launch: torch's process group does not always end


class Result(NamedTuple):
    """The result of one launch."""

    loss: float
    peak: int  # bytes, of the rank that holds most
    seconds: float  # the median over steps


def rank(options: argparse.Namespace) -> None:
    """One rank of a launch; rank 0 prints the result."""
    import time

    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    from peers import PEERS, Task

    from mpirun.cli.options import run_options
    from mpirun.cli.run import Run
    from mpirun.engine.memory_tracker import MemoryTracker

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    task = Task(comm, options, TEXT)
    with MemoryTracker() as memory:
        if options.contestant == "ours":
            arguments = [options.schedule, "--model", options.model, "--text", TEXT, "--threads", "1", "--timeout", "0"]
            interpreter = Run(comm, run_options(comm, arguments)).session.interpreter
            step = interpreter.run
        else:
            dist.init_process_group("gloo", f"file://{options.schedule}.meet", rank=comm.rank, world_size=comm.size)
            step = PEERS[options.contestant](task)
        found = step(0)
        losses = comm.allgather([float(x) for x in (found.losses if options.contestant == "ours" else found)])
        memory.reset_peak()
        step(1)
        peak = comm.allreduce(memory.peak, MPI.MAX)
    step(2)
    step(3)
    laps = []
    for number in range(4, 4 + options.steps):
        comm.Barrier()
        begin = time.perf_counter()
        step(number)
        laps.append(comm.allreduce(time.perf_counter() - begin, MPI.MAX))
    if comm.rank == 0:
        values = losses[0] if options.contestant == "ours" else [loss for of_rank in losses for loss in of_rank]
        print(json.dumps([statistics.mean(values), peak, statistics.median(laps)]), flush=True)
    comm.Barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


class Contest:
    """All contestants on one model."""

    def __init__(self, model: str, options: argparse.Namespace, folder: Path) -> None:
        self.model, self.options, self.folder = model, options, folder
        self.layers, self.microbatches = len(LAYERED[model].blocks), LAYERED[model].case.microbatches
        self.call = partial(subprocess.run, check=True, cwd=HERE, capture_output=True, text=True)
        self.results: dict[str, list[Result]] = {}
        self.launches = count()

    def launch(self, contestant: str, schedule: str, stages: int, name: str) -> None:
        """Launch a contestant, and add its result to those of `name`."""
        schedule = schedule or str(self.folder / f"{contestant}-{next(self.launches)}")  # where torch's ranks meet
        program = [str(HERE / "best.py"), "rank", contestant, schedule, "--model", f"cases:{self.model}"]
        program += ["--stages", str(stages), "--microbatches", str(self.microbatches)]
        command = [*mpi(self.options.ranks), "-m", "mpi4py", *program, "--steps", str(self.options.steps)]
        done = ended(command, LIMIT, HERE)
        printed = [line for line in done.stdout.splitlines() if line.startswith("[")]
        if done.returncode == 124:
            print(f"{name} on {self.model} did not end; it had measured {printed or 'nothing'}", flush=True)
            if not printed:
                return
        elif done.returncode:
            raise SystemExit(f"{name} on {self.model} ended with {done.returncode}:\n{done.stderr}")
        result = Result(*json.loads(printed[-1]))
        self.results.setdefault(name, []).append(result)
        expected = next(iter(self.results.values()))[0].loss
        if abs(result.loss - expected) > AGREE * abs(expected):
            raise SystemExit(f"{name} on {self.model}: the loss is {result.loss}, not {expected}: another training")

    def plan(self, limit: float) -> tuple[str, str] | None:
        """The file that plan writes, and a description of its schedule; None: plan found nothing that fits."""
        out, profile = self.folder / f"{limit:.0f}.json", str(self.folder / "profile.json")
        sizes = ["--workers", str(self.options.ranks), "--microbatches", str(self.microbatches)]
        most = [] if limit == float("inf") else ["--memory", f"{limit:.0f}"]
        most += ["--schemes", "1f1b"] * self.options.quick
        try:
            best = json.loads(schedgen("plan", profile, *sizes, *most, "--json", "-o", out))["schedules"][0]
        except subprocess.CalledProcessError as error:
            if error.returncode != 2:  # with valid arguments, 2 means that nothing fits
                raise SystemExit(f"plan ended with {error.returncode}") from None
            return None
        return str(out), f"{best['scheme']} x {best['replicas']}, {'-'.join(map(str, best['layers']))} layers"

    def run(self) -> list[float]:
        """Measure, and print a line for each limit; return the ratios."""
        ranks, profile = self.options.ranks, str(self.folder / "profile.json")
        stages = {name: STAGES[name] * ranks for name in self.options.theirs}
        theirs = {name: number for name, number in stages.items() if number <= self.layers}
        words: dict[str, set[str]] = {}
        for _ in range(self.options.rounds):
            for name in theirs:
                self.launch(name, "", theirs[name], name)
            model = ["--model", f"cases:{self.model}", "--threads", "1", "--stages", str(self.layers)]
            model += ["--steps", str(self.options.steps)]
            self.call([*mpi(ranks), "-m", "mpirun", "profile", *model, "-o", profile])
            if "ddp" not in self.results:
                raise SystemExit(f"ddp on {self.model} measured nothing, and limits are parts of its bytes")
            most = self.results["ddp"][0].peak
            for limit in self.options.limits:
                planned = self.plan(float("inf") if limit is None else limit * most)
                if planned is not None:
                    words.setdefault(str(limit), set()).add(planned[1])
                    self.launch("ours", planned[0], theirs["ddp"], f"ours {limit}")
        plans = {limit: " or ".join(sorted(words.get(str(limit), ()))) for limit in self.options.limits}
        return [self.line(limit, most, list(theirs), plans[limit]) for limit in self.options.limits]

    def line(self, limit: float | None, most: int, theirs: list[str], words: str) -> float:
        """Print the result under a limit; return the ratio."""
        bytes_ = float("inf") if limit is None else limit * most
        time = {name: statistics.median(x.seconds for x in found) for name, found in self.results.items()}
        peak = {name: max(x.peak for x in found) for name, found in self.results.items()}
        fitting = [name for name in theirs if name in peak and peak[name] <= bytes_]
        best, name = min(fitting, key=time.__getitem__, default=None), f"ours {limit}"
        ours = f"{1e3 * time[name]:8.1f} {peak[name] / 1e6:7.1f}" if name in time else f"{'-':>8} {'-':>7}"
        their = f"{1e3 * time[best]:8.1f} {peak[best] / 1e6:7.1f}" if best else f"{'-':>8} {'-':>7}"
        ratio = time[name] / time[best] if best and name in time else float("nan")
        over = " (ours holds more than the limit)" if name in time and peak[name] > bytes_ else ""
        print(
            f"{self.model:15} {'none' if limit is None else f'{limit:.0%}':>5}  {ours}   {their}   {ratio:6.3f}  "
            f"{words or 'nothing fits'}; theirs {best or 'nothing fits'}{over}",
            flush=True,
        )
        return ratio


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=LAYERED, default=list(LAYERED)[:-1])
    parser.add_argument("--limits", nargs="+", type=float, help="fractions of DDP's bytes; default: none, 0.6, 0.4")
    parser.add_argument("--quick", action="store_true", help="one model, one limit, two peers: whether it runs at all")
    options = parser.parse_args()
    options.limits, options.theirs = options.limits or LIMITS, list(STAGES)
    if options.quick:
        options.models, options.rounds, options.steps, options.limits = ["quick_layers"], 1, 1, [0.9]
        options.theirs = ["zbv", "ddp"]  # a pipeline, and the peer that limits are fractions of
    print(
        "ms a step and MB of the rank that holds most, medians of rounds; ratio: ours / the fastest of theirs that fits"
    )
    print(f"{'model':15} {'limit':>5}  {'ours ms':>8} {'MB':>7}   {'theirs':>8} {'MB':>7}   {'ratio':>6}")
    ratios = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            ratios += Contest(model, options, Path(folder)).run()
    there = [ratio for ratio in ratios if ratio == ratio]
    print(f"mean of {len(there)} ratios: {statistics.mean(there):.3f}" if there else "no ratio")


def rank_options() -> argparse.Namespace:
    """The options that `launch` passes to a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant")
    parser.add_argument("schedule")
    parser.add_argument("--model", required=True)
    for name in ("--stages", "--microbatches", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.set_defaults(seed=0)
    return parser.parse_args(sys.argv[2:])


if __name__ == "__main__":
    rank(rank_options()) if sys.argv[1:2] == ["rank"] else main()
