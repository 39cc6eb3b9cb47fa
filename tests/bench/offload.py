"""Peak memory of ranks that offload to a file in place of the host, beside the prediction.

`mpiexec -n 2 python tests/bench/offload.py [--width 256] [--layers 8] [--rows 4096] [--offload all] [--profile FILE]`
trains layers of `width` x 4 `width` by 1F1B. It prints, for each rank, the most anonymous memory that its steps add
(what lies in the file is not anonymous) and, after --profile, what `schedgen stats` predicts. A model of 400 million
parameters is --width 2048 --layers 12.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

import mpirun
from mpirun.comm.device import Device
from schedgen import Options, Sizes, compile, load, stats
from schedgen.simulator.machine import parse_profile

STATUS = Path("/proc/self/status")


def in_file(device: Device, size: int) -> Tensor:
    """Host memory in a file that is deleted when its last map is."""
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=max(size, 1)))


def anonymous() -> int:
    """The bytes of anonymous memory of this process that are resident."""
    return 1024 * int(re.findall(r"RssAnon:\s*(\d+)", STATUS.read_text())[0])


class Peak(threading.Thread):
    """Looks at the process's anonymous memory until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begin = self.most = anonymous()
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(2e-3):
            self.most = max(self.most, anonymous())


def block(width: int) -> nn.Module:
    """A layer that saves five times as much as it passes on."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 256), ("layers", 8), ("rows", 4096), ("microbatches", 8), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--offload", choices=("all", "none"), default="all")
    parser.add_argument("--profile")
    parser.add_argument("--quick", action="store_true", help="a small model: whether it runs at all")
    given, comm = parser.parse_args(), MPI.COMM_WORLD
    if given.quick:
        given.width, given.rows = 16, 32
    Device.host = in_file  # type: ignore[method-assign]
    width, per_stage = given.width, given.layers // comm.size
    torch.manual_seed(0)
    blocks = [block(width) for _ in range(given.layers)]
    stages = [nn.Sequential(*blocks[k * per_stage : (k + 1) * per_stage]) for k in range(comm.size)]
    sizes = Sizes(comm.size, given.microbatches)
    program = compile(load("gpipe", sizes), sizes, Options(offload="all" if given.offload == "all" else ()))
    batch = torch.randn(given.rows, width), torch.randn(given.rows, width)
    run = mpirun.Engine(program, stages, loss=nn.functional.mse_loss, example=batch)
    peak = Peak()
    peak.start()
    whole = tuple(x.repeat(given.microbatches, 1) for x in batch)
    for _ in range(given.steps):
        run.step(whole)
    peak.stop.set()
    most = comm.gather(peak.most - peak.begin)
    if given.profile:
        run.profile(given.profile, steps=1)
    if comm.rank == 0:
        print(f"offload {given.offload}: steps add", *(f"{size / 1e6:.0f}" for size in most or ()), "MB")
        if given.profile:
            costs, machine = parse_profile(Path(given.profile).read_text(), given.profile, comm.size)
            workers = stats(program, costs, machine)["workers"]
            print("predicted in all", *(f"{worker['peak_bytes'] / 1e6:.0f}" for worker in workers), "MB")
    run.close()


if __name__ == "__main__":
    main()
