"""Readings of clocks on 3 ranks of one host: one line on rank 0 for each claim that holds.

The host's ranks share a clock, so the true difference is known: zero, or the time by which a clock is set ahead here.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

from mpirun.comm.transport import Transport
from mpirun.engine.step_trace import as_rank_0_times, read_clocks

WORLD = MPI.COMM_WORLD
AHEAD = [0.0, 5.0, -3600.0]  # seconds: by which the clock of each rank is set ahead


def claim(name: str, holds: bool) -> None:
    if all(WORLD.allgather(holds)) and WORLD.rank == 0:
        print(f"holds: {name}", flush=True)


transport = Transport(WORLD, [])
before, after = read_clocks(transport), read_clocks(transport)
claim("one clock is found the same", abs(before.ahead) <= before.error)
times = np.linspace(before.time, after.time, 100)
claim("one clock is left as it is", bool((as_rank_0_times(times, before, after) == times).all()))

wrong = AHEAD[WORLD.rank]
before, after = (read_clocks(transport, lambda: time.perf_counter() + wrong) for _ in range(2))
claim("another clock is found", abs(before.ahead + wrong) <= before.error + 1e-9)
times = np.linspace(before.time, after.time, 100)
off = np.abs(as_rank_0_times(times, before, after) - (times - wrong)).max()
claim("another clock is corrected", bool(off <= max(before.error, after.error) + 1e-9))

if WORLD.rank == 0:
    print("holds: it ends", flush=True)
sys.exit()
