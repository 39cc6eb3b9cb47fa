"""The order problem for OR-Tools' CP-SAT: for small problems a proof, and sometimes a better order.

Starts are integers. Jobs of a worker do not overlap, jobs of a class follow one another, and the memory that a forward
takes is held until the job that frees it has ended. Times that are no multiples of a common unit are rounded down, so
that a bound stays valid. If backwards may be whole, each has a variable for it: the I of a whole backward takes all of
its time, and its W, directly after it, none.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from schedgen.planner.order_search.problem import OrderProblem
from schedgen.util.arrays import Flags, Numbers, Times

MOST_JOBS = 300  # of larger problems CP-SAT proves nothing in a minute
MOST_UNITS = 2**53  # in a schedule: all times are integers that a float holds exactly
FINEST = 2000  # units in the mean duration of a job, if times are not integers


class Solution(NamedTuple):
    """What CP-SAT found."""

    bound: float  # no order has a shorter longest window
    start: Times | None  # by job: when it starts in the best order found
    whole: Flags  # by job: whether it is the I of a whole backward
    optimal: bool


def is_installed() -> bool:
    """Whether OR-Tools can be imported."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        return False
    return True


def solve(
    problem: OrderProblem, start: Times, value: float, floor: float, seconds: float, whole: Times | None = None,
    is_whole: Flags | None = None,
) -> Solution:  # fmt: skip
    """Run CP-SAT from an order with starts `start` and longest window `value`.

    floor     a lower bound on the longest window
    seconds   the most deterministic time of CP-SAT
    whole     by job: for an I, the duration of the whole backward; None: backwards are not whole
    is_whole  by job: whether it is the I of a whole backward in that order
    """
    from ortools.sat.python import cp_model

    unit, flags = _unit(problem, whole), np.zeros(len(problem.length), np.bool_)
    if problem.length.sum() + problem.before_hop.sum() * problem.microbatches >= MOST_UNITS * unit:
        return Solution(0.0, None, flags, False)
    length, hop = (_units(times, unit) for times in (problem.length, problem.before_hop))
    horizon = int(length.sum() + hop.sum() * problem.microbatches) + 1
    horizon = min(horizon, 2 * int(np.ceil((start + problem.length).max() / unit)) + 1)
    model = cp_model.CpModel()
    begin = [model.new_int_var(0, horizon, "") for _ in length]
    size: list[Any] = length.tolist()  # numbers, unless whole backwards are a choice
    chosen = {} if whole is None else _add_choices(model, problem, begin, size, _units(whole, unit))
    end = [_end(model, at, time, horizon) for at, time in zip(begin, size, strict=True)]
    _add_waits(model, problem, begin, end, hop)
    longest = model.new_int_var(int(np.floor(floor / unit)), int(np.ceil(value / unit)), "")
    for w in range(len(problem.row) - 1):
        if problem.worker_class[w] < problem.worker_class[w + 1]:
            _add_worker(model, problem, w, begin, size, end, longest, horizon, bool(chosen))
    model.minimize(longest)
    for at, hint in zip(begin, start, strict=True):
        model.add_hint(at, round(hint / unit))
    for job, choice in chosen.items():
        model.add_hint(choice, bool(is_whole is not None and is_whole[job]))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # for reproducible results
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(solver.best_objective_bound * unit, None, flags, False)
    found = np.array([solver.value(at) for at in begin], np.float64)
    flags[list(chosen)] = [solver.value(choice) for choice in chosen.values()]
    return Solution(solver.best_objective_bound * unit, found, flags, status == cp_model.OPTIMAL)


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
    model: Any, problem: OrderProblem, w: int, begin: list[Any], size: list[Any], end: list[Any], longest: Any,
    horizon: int, any_turn: bool,
) -> None:  # fmt: skip
    """Add worker w: one job at a time, jobs of a class in the order of the microbatches, a window of at most
    `longest`. With `any_turn`, W jobs may come in any order, since some belong to whole backwards."""
    first_w = 2 * problem.stages * problem.microbatches
    classes = range(problem.worker_class[w], problem.worker_class[w + 1])
    by_class = [problem.class_jobs[problem.class_first[c] : problem.class_first[c + 1]] for c in classes]
    model.add_no_overlap(
        [
            model.new_fixed_size_interval_var(begin[j], size[j], "")
            if isinstance(size[j], int)
            else model.new_interval_var(begin[j], size[j], end[j], "")
            for j in np.concatenate(by_class)
        ]
    )
    opening: Any = 0
    if problem.own_window:
        opening = model.new_int_var(0, horizon, "")
        for each in by_class:
            model.add(opening <= begin[each[0]])
    for each in by_class:
        in_turn = each[0] < first_w or not any_turn
        for job, following in pairwise(each) if in_turn else ():
            model.add(begin[following] >= end[job])
        for job in each[-1:] if in_turn else each:
            model.add(longest >= end[job] - opening)
    if np.isfinite(problem.capacity[w]):
        _add_memory(model, problem, w, begin, end, horizon)


def _end(model: Any, begin: Any, size: Any, horizon: int) -> Any:
    """When a job ends: a variable of its own if its duration is a choice."""
    if isinstance(size, int):
        return begin + size
    end = model.new_int_var(0, horizon, "")
    model.add(end == begin + size)
    return end


def _add_choices(
    model: Any, problem: OrderProblem, begin: list[Any], size: list[Any], whole: Numbers
) -> dict[int, Any]:  # fmt: skip
    """By I job, a variable: whether its backward is whole; `size` of the I and its W become expressions of it."""
    shift, chosen = problem.stages * problem.microbatches, {}
    for job in range(shift, 2 * shift):
        choice = chosen[job] = model.new_bool_var("")
        model.add(begin[job + shift] == begin[job] + int(whole[job])).only_enforce_if(choice)
        size[job] = size[job] + (int(whole[job]) - size[job]) * choice
        size[job + shift] = size[job + shift] - size[job + shift] * choice
    return chosen


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


def _unit(problem: OrderProblem, whole: Times | None) -> float:
    """The length of a unit of time: the greatest common divisor of all times, or else a small time."""
    times = np.concatenate([problem.length, problem.before_hop, () if whole is None else whole])
    if (times == np.round(times)).all() and times.max() < 1e9:
        return float(np.gcd.reduce(times.astype(np.int64)))
    return float(problem.length.mean() / FINEST)


def _units(times: Times, unit: float) -> Numbers:
    return np.floor(times / unit + 1e-6).astype(np.int64)
