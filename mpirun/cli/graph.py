"""`python -m mpirun graph`: what stages read of each other, and ties, for `schedgen compile --graph`."""

from __future__ import annotations

import argparse

from mpirun.model import dataflow
from mpirun.model.contract import load
from schedgen.ir.stage_graph import chain
from schedgen.util.files import output


def write(options: argparse.Namespace) -> int:
    """Write the file; the exit code."""
    model = load(options.model, options.stages, seed=0)
    reads = model.wiring([[p for p, c in chain(options.stages) if c == stage] for stage in range(options.stages)], 1)
    found = dataflow.dag(reads, ([stage for stage, _ in tie] for tie in model.tied))
    with output(options.output) as out:
        out.write(dataflow.text(found).encode())
    return 0
