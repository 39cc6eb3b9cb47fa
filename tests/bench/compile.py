"""make bench-compile: the compiler against torch's, and its time and memory for a large schedule.

Side by side in one process, for the same ranks, microbatches and chunks:
torch's generator plus lowering with communication, as its visualizer calls
it, and our compile + check + write. Both are warm: the first run of each is
thrown away. Rates are instructions per second, of each compiler's own list.
"""

from __future__ import annotations

import argparse
import io
import logging
import pickle
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

import schedgen.util.jit
from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.ir.file import read, write
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate

P = ParamSpec("P")
T = TypeVar("T")
CASES = (("interleaved-1f1b", "Interleaved1F1B"), ("zb-v", "ZBVZeroBubble"))


def ours(name: str, ranks: int, microbatches: int) -> Program:
    sizes = Sizes(2 * ranks, microbatches, ranks)
    program = compile(load(name, sizes), sizes)
    check(program)
    write(program, io.BytesIO())
    return program


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def beside_torch(ranks: int, microbatches: int, runs: int) -> None:
    logging.disable()
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    print(f"{ranks} ranks x {microbatches} microbatches x 2 chunks: instructions a second, compile + check + write")
    for name, theirs in CASES:

        def torch_ops(theirs: str = theirs) -> int:
            ops = get_schedule_ops(theirs, ranks, microbatches, num_stages_per_rank=2, with_comms=True)
            return sum(1 for rank in ops for op in rank if op is not None)

        length, torch_length = len(ours(name, ranks, microbatches)), torch_ops()
        ratios, rates, torch_rates = [], [], []
        for _ in range(runs):
            rate = length / timed(lambda name=name: ours(name, ranks, microbatches))
            torch_rate = torch_length / timed(torch_ops)
            rates.append(rate)
            torch_rates.append(torch_rate)
            ratios.append(rate / torch_rate)
        print(
            f"  {name:18} ours {statistics.median(rates):>11,.0f} ({length} instructions)   torch "
            f"{statistics.median(torch_rates):>9,.0f} ({torch_length})   ratio {statistics.median(ratios):.1f} "
            f"({min(ratios):.1f} to {max(ratios):.1f})"
        )


def keep(file: Path, microbatches: int) -> None:
    """Append a line to `file`: instructions a second of CPU time, 1F1B on 16 ranks, the best of five.

    Also the numbers per second that NumPy sorts: how fast the machine is at that time.
    """
    sizes, numbers = Sizes(16, microbatches), np.random.default_rng(0).random(250 * microbatches)
    rates = {"compile": 0.0, "check": 0.0, "simulate": 0.0, "sort": 0.0}
    for _ in range(5):
        program, count = None, 0
        for name in rates:
            begin = time.process_time()
            if name == "compile":
                program = compile(load("1f1b", sizes), sizes)
                count = len(program)
            elif name == "check":
                check(program)
            elif name == "simulate":
                simulate(program, program.header.cost, Machine(alpha=1.0))
            else:
                count = len(np.sort(numbers))
            rates[name] = max(rates[name], count / (time.process_time() - begin))

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        return done.stdout.strip()

    commit = git("describe", "--always", "--exclude", "*") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no", ":/", f":(exclude){file.resolve()}"):
        commit += "-dirty"
    line = f"{datetime.now(UTC):%Y-%m-%d} {commit:15}" + "".join(f"{rate:14,.0f}" for rate in rates.values())
    with file.open("a") as out:
        out.write(f"{line}\n")
    print(f"{file}: {line}")


def large(workers: int, microbatches: int) -> None:
    """LPP of at most 64 stages on many workers: compiled, checked and written here, then read by another process."""
    sizes = lpp(workers, microbatches)
    warm_up()
    laps = Laps()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        program = laps.time("compile", compile, load("lpp", sizes), sizes)
        laps.time("check", check, program)
        laps.time("write", write, program, file)
        file.flush()
        size = f"{len(program):,} instructions, {file.tell() / 1e6:,.0f} MB"
        print(f"lpp, {workers:,} workers, {size}: us of CPU an instruction, user + system", flush=True)
        laps.show(len(program))
        del program
        subprocess.run([sys.executable, __file__, "--read", file.name], check=True)


def read_alone(name: str) -> None:
    """What rank 0 does with a file, and simulate: read, check, pickle every rank's part."""
    warm_up()
    laps = Laps()
    with Path(name).open("rb") as file:
        program, fault = laps.time("read", read, file, name)
    assert fault is None
    laps.time("check", check, program)
    laps.time("parts", lambda: [len(pickle.dumps(program.rows.take(slice(a, b)))) for a, b in pairwise(program.bounds)])
    laps.show(len(program))
    laps.time("simulate", simulate, program, program.header.cost)
    laps.show(len(program))


def lpp(workers: int, microbatches: int) -> Sizes:
    """Sizes of groups of at most 64 workers, with a stage each."""
    return Sizes(min(64, workers), microbatches, workers, groups=max(workers // 64, 1))


def warm_up() -> None:
    """Load, or compile, all kernels."""
    schedgen.util.jit.SMALL = 0
    sizes, file = lpp(4, 8), io.BytesIO()
    write(compile(load("lpp", sizes), sizes), file)
    file.seek(0)
    program, _ = read(file, "file")
    check(program)
    simulate(program, program.header.cost)


class Laps:
    """CPU seconds by part, user and system, and the most memory so far.

    System time is nearly all for new pages, which a virtual machine may have to get from its host first.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    def time(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = resource.getrusage(resource.RUSAGE_SELF)
        result = function(*args, **kwargs)
        end = resource.getrusage(resource.RUSAGE_SELF)
        self.seconds[name] = end.ru_utime - begin.ru_utime, end.ru_stime - begin.ru_stime
        return result

    def show(self, length: int) -> None:
        # Not ru_maxrss, which begins with that of the process that started this one.
        peak = 1024 * int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0])
        parts = {name: [1e6 * part / length for part in seconds] for name, seconds in self.seconds.items()}
        shown = "  ".join(f"{name} {user:.3f} + {system:.3f}" for name, (user, system) in parts.items())
        print(f"  {shown}  |  peak memory {peak / 1e6:,.0f} MB, {peak / length:.0f} bytes an instruction", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--history", type=Path, help="measure compile, check and simulate, and append a line to it")
    parser.add_argument("--large", type=int, metavar="WORKERS", help="only LPP on so many workers, part by part")
    parser.add_argument("--read", metavar="FILE", help="only what a reader of a file does")
    parser.add_argument("--quick", action="store_true", help="few ranks and microbatches: whether it runs at all")
    options = parser.parse_args()
    if options.large:
        large(options.large, options.microbatches)
        return
    if options.read:
        read_alone(options.read)
        return
    if options.history:
        keep(options.history, 4 if options.quick else 4000)
        return
    if options.quick:
        beside_torch(4, 8, 1)
        large(128, 4)
        return
    beside_torch(options.ranks, options.microbatches, options.runs)
    large(4096, 1600)


if __name__ == "__main__":
    main()
