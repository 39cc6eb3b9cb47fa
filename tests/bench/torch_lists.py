"""Schedules exported to torch and executed by its runtime: python tests/bench/torch_lists.py [RANKS ...]

Every golden pipeline list and three found ones, on 2 and 4 gloo ranks. `difference`: the greatest of a gradient from
mpirun's with the same list, 0 if all bits are equal, of the list with messages and of its jobs alone. `ms`: a step of
the list with messages; `ratio`: to torch's own class of the same name, the median over pairs of steps in turns, in the
same processes.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import ended, mpi, schedgen

HERE = Path(__file__).parent
STEPS, WARM, WIDTH, ROWS = 20, 3, 256, 32
LIMIT = 900  # seconds a launch may take
CLASSES = {
    "1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS", "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV",
}  # fmt: skip
ONE_STAGE = ("1f1b", "gpipe", "zb-h1", "zb-h2")
TWO_STAGES = ("interleaved-1f1b", "breadth-first", "depth-first", "interleaved-zb", "hanayo")
VS = ("zb-v", "dualpipe-v", "v-half", "v-min")
FOUND = {
    "found in zb-v": ("zb-v", "F=10,I=12,W=8", "--memory-limit", 4),
    "found in v-half": ("v-half", "F=3,I=4,W=2"),
    "found in interleaved": ("interleaved-1f1b", "F=10,B=21"),
}


def lists(ranks: int, folder: Path) -> list[str]:
    """Write the schedules and torch's lists for so many ranks; the names of the schedules."""
    names = [*ONE_STAGE, *TWO_STAGES, *VS, *FOUND]
    for name in names:
        path, golden = folder / f"{name}.json", HERE.parents[1] / "traces" / f"{name}.json"
        sizes = ("--stages", ranks * (1 if name in ONE_STAGE else 2), "--microbatches", 8, "--workers", ranks)
        if name in FOUND:
            scheme, cost, *more = FOUND[name]
            schedgen("search", scheme, *sizes, "--cost", cost, *more, "--budget", 1, "-o", path)
        elif ranks == 4:
            path.write_bytes(golden.read_bytes())
        else:
            schedgen("compile", name, *sizes, "-o", path)
        schedgen("export", path, "--to", "torch", "-o", folder / f"{name}.csv")
        schedgen("export", path, "--to", "torch-jobs", "-o", folder / f"{name}-jobs.csv")
    return names


def seconds(task: Any, schedules: list[tuple[Any, list[Any]]]) -> list[list[float]]:
    """The seconds of the timed steps of each schedule, which take turns."""
    import torch.distributed as dist

    times: list[list[float]] = [[] for _ in schedules]
    for number in range(WARM + STEPS):
        for (schedule, stages), of_one in zip(schedules, times, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            task.step(schedule, stages)
            dist.barrier()
            if number >= WARM:
                of_one.append(time.perf_counter() - begin)
    return times


def rank(folder: str, *names: str) -> None:
    """One rank: print on rank 0 a line of JSON for each schedule."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.distributed.pipelining import schedules
    from torch_runtime import Task, difference

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    logging.disable()
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=comm.rank, world_size=comm.size)
    for name in names:
        schedule, path = f"{folder}/{name}.json", f"{folder}/{name}.csv"
        line: dict[str, Any] = {"name": name, "own": None}
        both_forms = (path, f"{folder}/{name}-jobs.csv")
        line["differences"] = [difference(comm, Task(schedule), schedule, each) for each in both_forms]
        task = Task(schedule, WIDTH, ROWS)
        stages = task.torch_stages()
        both: list[tuple[Any, list[Any]]] = [(task.loaded(stages, path), stages)]
        if name in CLASSES:
            of_class, own = getattr(schedules, CLASSES[name]), task.torch_stages()
            given = own[0] if name in ONE_STAGE else own
            both.append((of_class(given, task.header.microbatches, torch.nn.functional.mse_loss), own))
        times = seconds(task, both)
        line["ms"] = 1e3 * statistics.median(times[0])
        if name in CLASSES:
            line["own"] = statistics.median(a / b for a, b in zip(*times, strict=True))
        if comm.rank == 0:
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def main(*ranks: str) -> None:
    """Print a table for each number of ranks; with --quick, of two lists on 2: whether it runs at all."""
    quick = "--quick" in ranks
    path = os.pathsep.join([str(HERE.parent / "helpers"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    for number in [2] if quick else map(int, ranks or ("2", "4")):
        with tempfile.TemporaryDirectory() as folder:
            names = [*lists(number, Path(folder))][: 2 if quick else None]
            command = [*mpi(number), "-m", "mpi4py", str(HERE / "torch_lists.py"), "rank", folder, *names]
            done = ended(command, LIMIT, HERE, environment)
        if done.returncode:
            raise SystemExit(f"{number} ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        print(f"{number} ranks             difference      jobs alone     ms  ratio")
        for line in map(json.loads, done.stdout.splitlines()):
            own = "-" if line["own"] is None else f"{line['own']:.2f}"
            differences = "".join(f"{each:12.3g}    " for each in line["differences"])
            print(f"{line['name']:20}{differences}{line['ms']:7.1f}{own:>7}", flush=True)


if __name__ == "__main__":
    (rank if sys.argv[1:2] == ["rank"] else main)(*sys.argv[1 + (sys.argv[1:2] == ["rank"]) :])
