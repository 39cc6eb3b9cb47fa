"""The order problem for OR-Tools' CP-SAT: for small problems a proof, and sometimes a better order.

Starts are whole numbers. Jobs of a worker do not overlap, those of a class follow each other, and what a forward takes
is held until the job that gives it back has ended. Where times are no whole multiples of a unit they are rounded down,
so that a bound stays one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from schedgen.planner.order_search.problem import Numbers, OrderProblem, Times, order_of

MOST_JOBS = 300  # of larger problems CP-SAT proves nothing in a minute
FINEST = 2000  # units in the mean duration of a job, where times are no whole numbers


class Proof(NamedTuple):
    """What CP-SAT found."""

    bound: float  # no order has a shorter longest window
    order: Numbers | None  # one that is as good as the best it saw
    optimal: bool


def is_installed() -> bool:
    """Whether there is an OR-Tools to call."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        return False
    return True


def solve(problem: OrderProblem, start: Times, value: float, floor: float, seconds: float) -> Proof:
    """Begin at an order whose jobs start at `start`, with the longest window `value`; the seconds are CP-SAT's own."""
    from ortools.sat.python import cp_model

    unit = _unit(problem)
    length, hop = (np.floor(times / unit + 1e-6).astype(np.int64) for times in (problem.length, problem.before_hop))
    horizon = int(length.sum() + hop.sum() * problem.microbatches) + 1
    horizon = min(horizon, 2 * int(np.ceil((start + problem.length).max() / unit)) + 1)
    model = cp_model.CpModel()
    begin = [model.new_int_var(0, horizon, "") for _ in length]
    end = [at + int(time) for at, time in zip(begin, length, strict=True)]
    batches = problem.microbatches
    for node in range(len(problem.before_first) - 1):
        for k in range(problem.before_first[node], problem.before_first[node + 1]):
            for b in range(batches):
                job, other = node * batches + b, problem.before[k] * batches + b
                wait = int(hop[k]) if problem.worker[job] != problem.worker[other] else 0
                model.add(begin[job] >= end[other] + wait)
    longest = model.new_int_var(int(np.floor(floor / unit)), int(np.ceil(value / unit)), "")
    for w in range(len(problem.row) - 1):
        classes = range(problem.worker_class[w], problem.worker_class[w + 1])
        jobs = [problem.class_jobs[problem.class_first[c] : problem.class_first[c + 1]] for c in classes]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(begin[j], int(length[j]), "") for j in np.concatenate(jobs)]
        )
        opening: Any = 0
        if problem.own_window:
            opening = model.new_int_var(0, horizon, "")
            for each in jobs:
                model.add(opening <= begin[each[0]])
        for each in jobs:
            for job, following in pairwise(each):
                model.add(begin[following] >= end[job])
            model.add(longest >= end[each[-1]] - opening)
        if np.isfinite(problem.capacity[w]):
            _add_memory(model, problem, w, begin, end)
    model.minimize(longest)
    for at, hint in zip(begin, start, strict=True):
        model.add_hint(at, round(hint / unit))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # the same answer every time
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(solver.best_objective_bound * unit, None, False)
    found = np.array([solver.value(at) for at in begin], np.float64)
    return Proof(solver.best_objective_bound * unit, order_of(problem, found), status == cp_model.OPTIMAL)


def _add_memory(model: Any, problem: OrderProblem, w: int, begin: list[Any], end: list[Any]) -> None:
    """What a job of worker w takes is held until the last job of its stage and microbatch ends; where the first half of
    a backward gives some of it back, that until then."""
    per_direction = problem.stages * problem.microbatches
    last = len(problem.worker) - per_direction
    takes = np.empty(len(problem.worker))
    takes[problem.class_jobs] = np.repeat(problem.takes, np.diff(problem.class_first))
    intervals, amounts = [], []

    def hold(first: int, until: int, amount: float) -> None:
        if amount:
            intervals.append(model.new_interval_var(begin[first], model.new_int_var(0, 10**9, ""), end[until], ""))
            amounts.append(int(amount))

    for job in np.flatnonzero(problem.worker[last:] == w).tolist():
        middle = takes[per_direction + job] if last > per_direction else 0.0
        hold(job, last + job, takes[job] + min(middle, 0.0))
        hold(job, per_direction + job, max(-middle, 0.0))
        hold(per_direction + job, last + job, max(middle, 0.0))
    model.add_cumulative(intervals, amounts, int(problem.capacity[w]))


def _unit(problem: OrderProblem) -> float:
    """The time that counts as 1: the greatest that divides all times, or a small one."""
    times = np.concatenate([problem.length, problem.before_hop])
    if (times == np.round(times)).all() and times.max() < 1e9:
        return float(np.gcd.reduce(times.astype(np.int64)))
    return float(problem.length.mean() / FINEST)
