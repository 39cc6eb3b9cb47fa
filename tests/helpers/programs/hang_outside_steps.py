"""An Engine on two ranks or more, the second of which hangs: `hang_outside_steps.py METHOD TIMEOUT DIRECTORY`.

evaluate      it computes for ever
save, export  it sleeps where it should write a file; the model that is exported has been evaluated only
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mpirun
from mpirun.checkpoint import disk_format, pretrained

METHOD, TIMEOUT, DIRECTORY = sys.argv[1:]


class Block(nn.Linear):
    """A layer whose forward never ends on rank 1 in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        while METHOD == "evaluate" and MPI.COMM_WORLD.rank == 1 and not self.training and x.device.type != "meta":
            pass
        return super().forward(x)


def sleep(*_: Any) -> None:
    """Sleep for ever."""
    time.sleep(1000)


if MPI.COMM_WORLD.rank == 1:
    disk_format.write_file = pretrained.save_tensors = sleep
torch.manual_seed(0)
batch = torch.randn(8, 4), torch.randn(8, 4)
blocks = [Block(4, 4) for _ in range(MPI.COMM_WORLD.size)]
run = mpirun.Engine("1f1b", blocks, loss=mse_loss, microbatches=4, timeout=float(TIMEOUT))
if METHOD == "export":
    run.evaluate([batch])
else:
    run.step(batch)
{
    "evaluate": lambda: run.evaluate([batch]),
    "save": lambda: run.save(DIRECTORY),
    "export": lambda: run.export(DIRECTORY),
}[METHOD]()
