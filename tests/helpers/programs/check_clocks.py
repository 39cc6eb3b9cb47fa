"""Readings of clocks on 3 ranks of one host: one line on rank 0 for each claim that holds.

The host's ranks share a clock, so the true difference is known: zero, or the time by which a clock is set ahead here.
"""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

from mpirun.comm.transport import Transport
from mpirun.engine.step_trace import clock_ahead

WORLD = MPI.COMM_WORLD
AHEAD = [0.0, 5.0, -3600.0]  # seconds: by which the clock of each rank is set ahead


def claim(name: str, holds: bool) -> None:
    if all(WORLD.allgather(holds)) and WORLD.rank == 0:
        print(f"holds: {name}", flush=True)


transport = Transport(WORLD, [])
claim("one clock is found the same", clock_ahead(transport) == 0)
wrong = AHEAD[WORLD.rank]
claim("another clock is found", abs(clock_ahead(transport, lambda: time.perf_counter() + wrong) + wrong) < 0.01)

if WORLD.rank == 0:
    print("holds: it ends", flush=True)
sys.exit()
