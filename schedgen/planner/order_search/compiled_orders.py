"""Orders as schedules: compiled, read back, and judged by the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.cost import REDO, by_stage
from schedgen.ir.instructions import B, F, Op, W
from schedgen.ir.program import Program
from schedgen.planner.order_search.problem import as_placement
from schedgen.planner.order_search.question import Question
from schedgen.planner.order_search.ways import Way, Ways
from schedgen.planner.stage_costs import cost_ratios
from schedgen.simulator.simulate import Simulation, simulate
from schedgen.util.arrays import Numbers

MOST = 5e11  # costs below it can be in a file, and so can I + W


def order_costs(question: Question) -> dict[str, float]:
    """One number for each direction, by which greedy schemes order jobs, and which the file keeps.

    These are the question's costs, where each is the same for all stages and a file can have it; else mean ratios to F.
    """
    costs = {name: by_stage(amount, question.sizes.stages) for name, amount in question.cost.items()}
    same = {name: float(times[0]) for name, times in costs.items() if (times == times[0]).all()}
    if len(same) < len(costs) or not all(1e-12 < time < MOST or name == REDO for name, time in same.items()):
        return cost_ratios(costs)
    return {name: int(time) if time.is_integer() else time for name, time in same.items()}


def compile_own(question: Question) -> Program:
    """Compile a scheme in its own order."""
    options = Options(cost=order_costs(question), tied=question.tied)
    return _with_limit(compile(question.scheme, question.sizes, options), question)


def compile_order(question: Question, n: Numbers, ways: Ways | None = None) -> Program:
    """The schedule of a found order of a scheme's jobs.

    n     a number of every job, (D, S, B), that grows along each worker
    ways  (S, B): what becomes of what each forward saves; None: all is kept
    """
    scheme = as_placement(question.scheme, len(n) == 3)._replace(
        n=lambda s, b, d: n[d, s, b], order=f"search {question.limits.objective}", mode="strict"
    )
    ways = np.zeros(n.shape[1:], np.int8) if ways is None else ways
    redone, away = ([(s, b) for s, b in np.argwhere(ways == way).tolist()] for way in (Way.REDO, Way.AWAY))
    options = Options(cost=order_costs(question), recompute=redone, offload=away, tied=question.tied)
    return _with_limit(compile(scheme, question.sizes, options), question)


def _with_limit(program: Program, question: Question) -> Program:
    if question.limits.saved is None:
        return program
    lowering = {**program.header.lowering, "memory_limit": question.limits.saved}
    return replace(program, header=replace(program.header, lowering=lowering))


def numbers_of(program: Program, directions: int) -> Numbers:
    """For every job (D, S, B) a number that grows along each worker; of 3 directions, a whole backward becomes an I and
    then its W."""
    table, (_, stages, batches) = program.rows, program.header.compute.shape
    n = np.zeros((directions, stages, batches), np.int64)
    ops = {F: (Op.FWD,), B: (Op.BWD, Op.BWD_I), W: (Op.BWD, Op.BWD_W)}
    for d in range(directions):
        rows = program.rows_of(*ops[d])
        n[d, table.stage[rows], table.mb[rows]] = 2 * rows + (d == W)
    return n


class Judgement(NamedTuple):
    """The simulator's results for a schedule."""

    run: Simulation
    value: float  # of the objective
    over: float  # by how much it exceeds the limit, in saved forwards or bytes

    @property
    def fits(self) -> bool:
        """Whether it keeps to the limits."""
        return self.over == 0


def judge(question: Question, program: Program) -> Judgement:
    """Simulate a schedule of the question's jobs, and compare its memory with the limits."""
    run, limits, over = simulate(program, question.cost, question.machine), question.limits, 0.0
    if limits.bytes is not None:
        over = float(run.footprint.peak.max() - limits.bytes)
    elif limits.saved is not None:
        over = float(analyse(program).memory.saved.max() - limits.saved)
    return Judgement(run, measured(run, limits.objective == "window"), max(0.0, over))


def measured(run: Simulation, own_window: bool) -> float:
    """The latency of a program in the simulator, or its longest own window."""
    first, last = run.windows
    return float((last - first).max()) if own_window else run.latency
