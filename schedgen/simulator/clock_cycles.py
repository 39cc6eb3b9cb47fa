"""Clock cycles: the times at which jobs of a schedule start, each with the jobs that start then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedgen.ir.cost import DIRECTION, Amount
from schedgen.ir.instructions import COMPUTE, Op
from schedgen.ir.program import Program
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import plain


class Cycle(NamedTuple):
    """The jobs that start together."""

    time: int | float
    jobs: list[tuple[str, int, int]]  # direction, stage, microbatch; by worker


def clock_cycles(program: Program, cost: Mapping[str, Amount] | None = None) -> list[Cycle]:
    """The cycles of a checked, projected program in the order of time, in the units of `cost` (default: the file's).

    Messages take no time. Where all jobs take one unit, as GPipe's forwards do, these are the cycles that its authors
    count. An unsplit backward among split ones is B; a RECOMPUTE is a part of its backward.
    """
    table = program.rows
    run = simulate(program, program.header.cost if cost is None else cost)
    rows = np.flatnonzero(np.isin(table.op, COMPUTE) & (table.op != Op.RECOMPUTE))
    start = run.start[rows]
    order = np.lexsort((rows, start))
    shortest = float((run.end[rows] - start).min())
    first = np.flatnonzero(np.append(True, np.diff(start[order]) > 1e-6 * shortest))  # rounding makes no new cycle
    cycles = []
    for together in np.split(rows[order], first[1:]):
        columns = (column[np.sort(together)].tolist() for column in (table.op, table.stage, table.mb))
        jobs = [(DIRECTION[Op(op)], stage, mb) for op, stage, mb in zip(*columns, strict=True)]
        cycles.append(Cycle(plain(float(run.start[together].min())), jobs))
    return cycles
