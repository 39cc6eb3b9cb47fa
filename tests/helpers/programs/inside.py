"""A run of mpirun looked at from inside; an object:

    arguments  those of mpirun
    delay      a seed: before every instruction something may hold the rank up, each time for another while
    late       a device that does its work late: "direct" or "staged"
    record     a file for a `Record` of all stages; needs --verify

What comes of it: its exit code, its stdout, and a hash of all weights in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from late import Late
from mpi4py import MPI

import mpirun.cli.run
from mpirun.cli.options import RunOptions, run_options
from mpirun.comm.device import Device, choose_device
from mpirun.verify.record import Mine, Record, gather

WORLD = MPI.COMM_WORLD


class Run(mpirun.cli.run.Run):
    def __init__(self, options: RunOptions, record: str | None) -> None:
        super().__init__(WORLD, options)
        self.record = record

    def _verify(self, record: Mine) -> int:
        code = super()._verify(record)
        whole = gather(self.comm, self.header, self.training.shapes, record)
        if self.record is not None and WORLD.rank == 0:
            assert isinstance(whole, Record), whole
            torch.save(whole._asdict(), self.record)
        return code

    def weights(self) -> str:
        """A hash of the weights of all stages, on all ranks that own them."""
        stages = self.interpreter.optimizer.stages
        mine = {
            f"{s}/{k}" if k >= 0 else s: bytes(part.view(torch.uint8).numpy())
            for s, one in stages.items()
            for k, part in one.own.items()
        }
        everything = WORLD.allgather({s: hashlib.sha256(data).hexdigest() for s, data in mine.items()})
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def delayed(act: Callable[[], None], rng: np.random.Generator) -> Callable[[], None]:
    """Half of the times nothing, else up to 3 ms, and one time of a hundred 20 ms."""

    def run() -> None:
        if (luck := rng.random()) < 0.5:
            time.sleep(0.02 if luck < 0.01 else 0.003 * rng.random())
        act()

    return run


def new_device(late: str | None, seed: int) -> Callable[[MPI.Intracomm, str], Device]:
    return choose_device if late is None else lambda comm, name: Late(late == "direct", seed)


def run(one: dict[str, Any]) -> tuple[int, str, str]:
    out = io.StringIO()
    late = mock.patch("mpirun.engine.setup.choose_device", new_device(one.get("late"), WORLD.rank))
    with contextlib.redirect_stdout(out), late:
        made = Run(run_options(WORLD, one["arguments"]), one.get("record"))
        if (seed := one.get("delay")) is not None:
            rng = np.random.default_rng([seed, WORLD.rank])
            made.interpreter.code = [delayed(act, rng) for act in made.interpreter.code]
        code = made.execute()
    return max(WORLD.allgather(code)), out.getvalue(), made.weights()
