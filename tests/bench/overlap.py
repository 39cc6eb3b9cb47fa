"""make bench-run: how much of the time of large messages overlaps with computation.

Two ranks, four interleaved stages, activations of 4 MiB: every boundary of
stages crosses ranks. The same training in three ways, step by step in turns:
as it is; with every SEND waiting until the message has arrived and without calls of MPI during computations;
and with messages of one element in place of whole ones, which cost next to
nothing. Hidden is the part of the second's time beyond the third's that the
first saves. The simulator, given the measured profile, says how much could be hidden.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

import mpirun.engine.build
from mpirun import Model
from mpirun.cli.options import run_options
from mpirun.cli.run import Run
from mpirun.comm.transport import Receive, Transport
from mpirun.comm.waiting import Done
from mpirun.engine.first_step import run_first

QUICK = "--quick" in sys.argv
WIDTH, ROWS, STAGES = 512, 2048, 4
MODEL, MICROBATCHES, STEPS = ("overlap:narrow", 2, 2) if QUICK else ("overlap:wide", 8, 36)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.byte(tokens))


def wide(stages: int, rows: int = ROWS) -> Model:
    """A linear layer or two a stage; activations of (2048, 512) float32, 4 MiB."""
    inner = [lambda: nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(stages - 2)]
    last = lambda: nn.Sequential(nn.GELU(), nn.Linear(WIDTH, 256))  # noqa: E731

    def batch(text: Tensor, rng: object) -> tuple[Tensor, Tensor]:
        start = int(rng.integers(0, len(text) - rows))  # type: ignore[attr-defined]
        piece = text[start : start + rows + 1].long()
        return piece[:-1], piece[1:]

    return Model([First, *inner, last], nn.functional.cross_entropy, batch, rows + 1)


def narrow(stages: int) -> Model:
    """For --quick: activations of 32 KiB."""
    return wide(stages, 16)


class Blocking(Transport):
    def send(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Done:
        done = super().send(tensor, peer, tag, comm)
        self.wait(done)
        return lambda: True


class Tiny(Transport):
    def send(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Done:
        return super().send(tensor.reshape(-1)[:1], peer, tag, comm)

    def receive(self, tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None = None) -> Receive:
        tensor.zero_()
        return super().receive(tensor.reshape(-1)[:1], peer, tag, comm)


def measure(schedule: str) -> None:
    comm = MPI.COMM_WORLD
    arguments = [schedule, "--model", MODEL, "--threads", "1", "--timeout", "0", "--steps", str(STEPS)]
    runs = {}
    for name, kind in (("ours", Transport), ("blocking", Blocking), ("free", Tiny)):
        mpirun.engine.build.make_transport = lambda *arguments, device, kind=kind: kind(*arguments)
        runs[name] = Run(comm, run_options(comm, arguments)).session.interpreter
        if name == "blocking":
            runs[name].run(0)
        else:
            run_first(runs[name], 0)
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}  # seconds, and those of them waited
    for step in range(1, STEPS + 1):
        for name in sorted(runs, reverse=bool(step % 2)):
            comm.Barrier()
            waited, begin = runs[name].transport.waited, time.perf_counter()
            runs[name].run(step)
            spent = time.perf_counter() - begin, runs[name].transport.waited - waited
            laps[name].append(comm.allreduce(np.array(spent)).tolist())
    if comm.rank == 0:
        print(json.dumps(laps))


def main() -> None:
    from ranks import mpi, schedgen

    with tempfile.TemporaryDirectory() as folder:
        schedule, profile = str(Path(folder) / "schedule.json"), str(Path(folder) / "profile.json")
        sizes = ["--stages", STAGES, "--microbatches", MICROBATCHES, "--workers", 2]
        call: Callable[..., subprocess.CompletedProcess[str]] = partial(
            subprocess.run, check=True, cwd=Path(__file__).parent, capture_output=True, text=True
        )
        schedgen("compile", "interleaved-1f1b", *sizes, "-o", schedule)
        call([*mpi(2), "-m", "mpirun", "profile", "--model", MODEL, "--schedule", schedule, "--threads", "1",
              "--steps", str(STEPS), "-o", profile])  # fmt: skip
        out = call([*mpi(2), "-m", "mpi4py", __file__, *sys.argv[1:], schedule]).stdout
        laps = json.loads(out.splitlines()[-1])
        costs = json.loads(Path(profile).read_text())
        times = {}
        for name, links in (("links", {}), ("free", {"alpha": 0.0, "beta": 0.0})):
            Path(profile).write_text(json.dumps(costs | links))
            times[name] = json.loads(schedgen("simulate", schedule, "--profile", profile, "--json"))["makespan"]
    seconds, waits = (
        {name: statistics.median(x[k] for x in steps) / 2 for name, steps in laps.items()} for k in (0, 1)
    )
    rounds = list(zip(laps["ours"], laps["blocking"], laps["free"], strict=True))
    hidden = [statistics.median((b[k] - o[k]) / (b[k] - f[k]) for o, b, f in rounds) for k in (0, 1)]
    exposed = (times["links"] - times["free"]) / (seconds["blocking"] - seconds["free"])
    print(
        "messages of 32 KiB," if QUICK else "messages of 4 MiB,",
        "ms a step and rank: as it is, every SEND waited for, messages for nothing",
    )
    for name, by_way, share in (("waits", waits, hidden[1]), ("step", seconds, hidden[0])):
        each = "  ".join(f"{1e3 * by_way[way]:7.1f}" for way in ("ours", "blocking", "free"))
        print(f"  {name:6} {each}   hidden {share:.0%}")
    print(f"  the simulator says {1 - exposed:.0%} can be; its messages take no core's time, these do")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(sys.argv[-1]) if sys.argv[-1].endswith(".json") else main()
