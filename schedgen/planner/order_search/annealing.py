"""Simulated annealing on an order: a job moves to another place of its worker's sequence.

Most moves are of jobs on the critical path of the worker with the longest window, since others cannot shorten it.
Orders are compared by the longest window plus the mean of all windows: of two orders with the same longest window, the
one with the smaller mean is nearer to a shorter one.
"""

from __future__ import annotations

import numpy as np

from schedgen.planner.order_search.problem import OrderProblem
from schedgen.planner.order_search.run_order import Run, run_order
from schedgen.util.arrays import Numbers
from schedgen.util.jit import kernel

CRITICAL = 90  # percent of moves that begin on the critical path
REACH = 8  # places that a job moves at the most
HOT = (0.03, 0.3, 2.0)  # temperatures at the first move, in mean durations of a job


@kernel
def anneal(
    problem: OrderProblem, order: Numbers, seed: int, moves: int, hot: float, cold: float, floor: float,
    run: Run, trial: Run,
) -> tuple[float, Numbers, int]:  # fmt: skip
    """Anneal `order` in place; return (longest window, order, moves judged) of the best order on the way.

    hot, cold   temperatures at the first and the last move, in the unit of the costs
    floor       a lower bound: the search ends when it is reached
    run, trial  working arrays
    """
    row, takes, worker = problem.row, problem.takes, problem.worker
    jobs, capacity = len(worker), problem.capacity * (1 + 1e-12)
    state = 1 + seed % 2147483646
    least = run_order(problem, order, np.inf, run)
    cost = least + run.window.mean()
    best, best_cost = order.copy(), cost
    place_of, path = np.zeros(jobs, np.int64), np.zeros(jobs, np.int64)
    length, judged, known = 0, 0, False
    for move in range(moves):
        if least <= floor * (1 + 1e-9):
            break
        state = state * 48271 % 2147483647  # Park and Miller 1988, revised
        draw = state
        state = state * 48271 % 2147483647
        if draw % 100 < CRITICAL:
            if not known:
                for place in range(jobs):
                    place_of[run.job[place]] = place
                length, known = critical_path(problem, run, place_of, path), True
            place = path[state % length]
        else:
            place = state % jobs
        w = worker[run.job[place]]
        state = state * 48271 % 2147483647
        distance = state // 16 % REACH + 1
        earlier = draw // 128 % 10 < 7
        target = max(row[w], place - distance) if earlier else min(row[w + 1] - 1, place + distance)
        if target == place:
            continue
        shift(order, place, target)
        low, high = min(place, target), max(place, target)
        held, fits = 0.0, True
        for k in range(row[w], high + 1):
            taken = takes[order[k]]
            held += taken
            if k >= low and taken > 0 and held > capacity[w]:
                fits = False
                break
        accepted = False
        if fits:
            judged += 1
            state = state * 48271 % 2147483647
            temperature = hot * (cold / hot) ** (move / moves)
            threshold = cost - temperature * np.log(state / 2147483647)
            value = run_order(problem, order, threshold, trial)
            if value < np.inf and value + trial.window.mean() <= threshold:
                accepted, known = True, False
                run, trial = trial, run
                cost = value + run.window.mean()
                if value < least * (1 - 1e-12) or (value <= least and cost < best_cost):
                    least, best_cost = value, cost
                    for k in range(jobs):
                        best[k] = order[k]
        if not accepted:
            shift(order, target, place)
    return least, best, judged


@kernel
def shift(order: Numbers, place: int, target: int) -> None:
    """Move the element at one place to another; those between move by one."""
    moved = order[place]
    if target < place:
        for k in range(place, target, -1):
            order[k] = order[k - 1]
    else:
        for k in range(place, target):
            order[k] = order[k + 1]
    order[target] = moved


@kernel
def critical_path(problem: OrderProblem, run: Run, place_of: Numbers, path: Numbers) -> int:
    """Write the places of the jobs that lead to the end of the longest window into `path`; return their number."""
    row, worker, length, start = problem.row, problem.worker, problem.length, run.start
    batches, before_first, before, hop = problem.microbatches, problem.before_first, problem.before, problem.before_hop
    place, count = row[np.argmax(run.window) + 1] - 1, 0
    while place >= 0:
        path[count] = place
        count += 1
        job = run.job[place]
        w, slack = worker[job], 1e-9 * (start[job] + length[job])
        if place > row[w] and start[run.job[place - 1]] + length[run.job[place - 1]] >= start[job] - slack:
            place -= 1
            continue
        node, place = job // batches, -1
        for k in range(before_first[node], before_first[node + 1]):
            other = before[k] * batches + job - node * batches
            arrival = start[other] + length[other] + (0.0 if worker[other] == w else hop[k])
            if arrival >= start[job] - slack:
                place = place_of[other]
    return count
