"""Orders as schedules: compiled, read back, and judged by the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.cost import REDO, Amount, by_stage, durations, has_both
from schedgen.ir.instructions import COMPUTE, B, F, Op, W
from schedgen.ir.program import Program
from schedgen.planner.order_search.found_order import Limits, Ties
from schedgen.planner.order_search.placed_problem import as_placement
from schedgen.planner.order_search.problem import Flags, Numbers
from schedgen.planner.stage_costs import cost_ratios
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.simulate import Simulation


def own_costs(scheme: Scheme, cost: Mapping[str, Amount]) -> Mapping[str, Amount]:
    """Of costs of whole backwards and of halves those that the scheme has, and R; otherwise all."""
    if not has_both(cost):
        return cost
    return durations(cost, 3 if scheme.split else 2) | {name: time for name, time in cost.items() if name == REDO}


def mean_ratios(cost: Mapping[str, Amount], sizes: Sizes) -> dict[str, float]:
    """Costs by stage as one number for each direction, by which greedy schemes order."""
    return cost_ratios({name: by_stage(amount, sizes.stages) for name, amount in cost.items()})


def compile_own(scheme: Scheme, sizes: Sizes, ratios: Mapping[str, float], tied: Ties = ()) -> Program:
    """A scheme in its own order; where the backward has halves in `ratios` alone, their sum."""
    whole = not scheme.split and "B" not in ratios
    cost = {"F": ratios["F"], "B": ratios["I"] + ratios["W"]} if whole else ratios
    return compile(scheme, sizes, Options(cost=cost, tied=tied))


def compile_order(
    scheme: Scheme,
    sizes: Sizes,
    n: Numbers,
    ratios: Mapping[str, float],
    limits: Limits,
    tied: Ties = (),
    redone: Flags | None = None,
    whole: Flags | None = None,
) -> Program:
    """The schedule of a found order of a scheme's jobs.

    n              a number of every job, (D, S, B), that grows along each worker
    redone, whole  by (S, B): forwards that are redone, and backwards that are not split; None: none
    """
    scheme = as_placement(scheme, len(n) == 3)._replace(
        n=lambda s, b, d: n[d, s, b],
        order=f"search {limits.objective}",
        mode="strict",
        unsplit_backward=None if whole is None else lambda s, b: whole[s, b],
    )
    pairs = () if redone is None else [(s, b) for s, b in np.argwhere(redone).tolist()]
    program = compile(scheme, sizes, Options(cost=ratios, recompute=pairs, tied=tied))
    if limits.saved is None:
        return program
    lowering = {**program.header.lowering, "memory_limit": limits.saved}
    return replace(program, header=replace(program.header, lowering=lowering))


def numbers_of(program: Program) -> Numbers:
    """Of every job (D, S, B) a number that grows along each worker; a whole backward is an I and then its W."""
    table, shape = program.rows, program.header.compute.shape
    n = np.zeros(shape, np.int64)
    directions = {F: (Op.FWD,), B: (Op.BWD, Op.BWD_I), W: (Op.BWD, Op.BWD_W)}
    for d in range(shape[0]):
        rows = np.flatnonzero(np.isin(table.op, directions[d]))
        n[d, table.stage[rows], table.mb[rows]] = 2 * rows + (d == W)
    return n


def measured(run: Simulation, own_window: bool) -> float:
    """The latency of a program in the simulator, or its longest own window."""
    rows, workers = run.program.rows, run.program.header.workers
    jobs = np.flatnonzero(np.isin(rows.op, COMPUTE))
    first, last = np.full(workers, np.inf), np.zeros(workers)
    np.minimum.at(first, rows.rank[jobs], run.start[jobs])
    np.maximum.at(last, rows.rank[jobs], run.end[jobs])
    return float((last - first).max() if own_window else last.max())
