"""The order problem for OR-Tools' CP-SAT: for small problems a proof, and sometimes a better order.

Starts are integers. Jobs of a worker do not overlap, jobs of a class follow one another, and the memory that a forward
takes is held until the job that frees it has ended. Times that are no multiples of a common unit are rounded down, so
that a bound stays valid.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from schedgen.planner.order_search.problem import OrderProblem
from schedgen.util.arrays import Numbers, Times

MOST_JOBS = 300  # of larger problems CP-SAT proves nothing in a minute
MOST_UNITS = 2**53  # in a schedule: all times are integers that a float holds exactly
FINEST = 2000  # units in the mean duration of a job, if times are not integers


class Solution(NamedTuple):
    """What CP-SAT found."""

    bound: float  # no order has a shorter longest window
    start: Times | None  # by job: when it starts in the best order found
    optimal: bool


def is_installed() -> bool:
    """Whether OR-Tools can be imported."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        return False
    return True


def solve(problem: OrderProblem, start: Times, value: float, floor: float, seconds: float) -> Solution:
    """Run CP-SAT from an order with starts `start` and longest window `value`.

    floor    a lower bound on the longest window
    seconds  the most deterministic time of CP-SAT
    """
    from ortools.sat.python import cp_model

    times = np.concatenate([problem.length, problem.before_hop])
    unit = float(problem.length.mean() / FINEST)
    if (times == np.round(times)).all() and times.max() < 1e9:
        unit = float(np.gcd.reduce(times.astype(np.int64)))
    if problem.length.sum() + problem.before_hop.sum() * problem.microbatches >= MOST_UNITS * unit:
        return Solution(0.0, None, False)
    length, hop = (np.floor(times / unit + 1e-6).astype(np.int64) for times in (problem.length, problem.before_hop))
    horizon = int(length.sum() + hop.sum() * problem.microbatches) + 1
    horizon = min(horizon, 2 * int(np.ceil((start + problem.length).max() / unit)) + 1)
    model = cp_model.CpModel()
    begin = [model.new_int_var(0, horizon, "") for _ in length]
    end = [at + time for at, time in zip(begin, length, strict=True)]
    _add_waits(model, problem, begin, end, hop)
    longest = model.new_int_var(int(np.floor(floor / unit)), int(np.ceil(value / unit)), "")
    for w in range(len(problem.row) - 1):
        if problem.worker_class[w] < problem.worker_class[w + 1]:
            _add_worker(model, problem, w, begin, length, end, longest, horizon)
    model.minimize(longest)
    for at, hint in zip(begin, start, strict=True):
        model.add_hint(at, round(hint / unit))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # for reproducible results
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(solver.best_objective_bound * unit, None, False)
    found = np.array([solver.value(at) for at in begin], np.float64)
    return Solution(solver.best_objective_bound * unit, found, status == cp_model.OPTIMAL)


def _add_waits(model: Any, problem: OrderProblem, begin: list[Any], end: list[Any], hop: Numbers) -> None:
    """Add that a job begins after the jobs it waits for, and their messages; `hop`: `before_hop` in units."""
    batches = problem.microbatches
    for node in range(len(problem.before_first) - 1):
        for k in range(problem.before_first[node], problem.before_first[node + 1]):
            for b in range(batches):
                job, other = node * batches + b, problem.before[k] * batches + b
                wait = int(hop[k]) if problem.worker[job] != problem.worker[other] else 0
                model.add(begin[job] >= end[other] + wait)


def _add_worker(
    model: Any, problem: OrderProblem, w: int, begin: list[Any], length: Numbers, end: list[Any], longest: Any,
    horizon: int,
) -> None:  # fmt: skip
    """Add worker w: one job at a time, jobs of a class in the order of the microbatches, a window of at most
    `longest`."""
    classes = range(problem.worker_class[w], problem.worker_class[w + 1])
    by_class = [problem.class_jobs[problem.class_first[c] : problem.class_first[c + 1]] for c in classes]
    model.add_no_overlap([model.new_fixed_size_interval_var(begin[j], length[j], "") for j in np.concatenate(by_class)])
    opening: Any = 0
    if problem.own_window:
        opening = model.new_int_var(0, horizon, "")
        for each in by_class:
            model.add(opening <= begin[each[0]])
    for each in by_class:
        for job, following in pairwise(each):
            model.add(begin[following] >= end[job])
        model.add(longest >= end[each[-1]] - opening)
    if np.isfinite(problem.capacity[w]):
        _add_memory(model, problem, w, begin, end, horizon)


def _add_memory(
    model: Any, problem: OrderProblem, w: int, begin: list[Any], end: list[Any], horizon: int
) -> None:  # fmt: skip
    """Add the memory of worker w: what a job takes is held until the last job of its stage and microbatch ends, but a
    part that the first half of a backward frees only until that half ends."""
    per_direction = problem.stages * problem.microbatches
    last = len(problem.worker) - per_direction
    takes = np.empty(len(problem.worker))
    takes[problem.class_jobs] = np.repeat(problem.takes, np.diff(problem.class_first))
    intervals, amounts = [], []

    def hold(first: int, until: int, amount: float) -> None:
        if amount:
            intervals.append(
                model.new_interval_var(begin[first], model.new_int_var(0, 2 * horizon, ""), end[until], "")
            )
            amounts.append(int(amount))

    for job in np.flatnonzero(problem.worker[last:] == w).tolist():
        middle = takes[per_direction + job] if last > per_direction else 0.0
        hold(job, last + job, takes[job] + min(middle, 0.0))
        hold(job, per_direction + job, max(-middle, 0.0))
        hold(per_direction + job, last + job, max(middle, 0.0))
    model.add_cumulative(intervals, amounts, int(problem.capacity[w]))
