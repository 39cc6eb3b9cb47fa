"""A run on GPUs each of whose stages begins 20 million cycles late; with UNMARKED=1 no transfer waits for kernels.

The arguments are those of mpirun.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch

from mpirun.cli.main import main
from mpirun.comm.device import Cuda
from mpirun.engine.core.stage import LocalStage

CYCLES = 20_000_000
real_forward, real_mark = LocalStage.forward, Cuda.mark


def forward(self: LocalStage, *arguments: Any) -> Any:
    """As `LocalStage.forward`, late."""
    torch.cuda._sleep(CYCLES)
    return real_forward(self, *arguments)


if __name__ == "__main__":
    mark = (lambda self: None) if "UNMARKED" in os.environ else real_mark
    with mock.patch.object(LocalStage, "forward", forward), mock.patch.object(Cuda, "mark", mark):
        sys.exit(main())
