"""The forwards and backwards of an order with its W jobs placed anew: in gaps, and no sooner than necessary.

A W goes into a gap that is long enough. At a shorter gap the worker waits if its window can still end by a target, that
is, if the time left after the wait is no less than the duration of its remaining jobs. Otherwise a W goes first, and
the jobs after it are delayed. So W jobs are kept for the end, where backwards are rare, and every worker waits about
equally long. The greedy search for ZB-V does the same with the largest idle time so far in place of a target [Qi et al.
2023, "Zero bubble pipeline parallelism", section 6]. If memory is full, the oldest W goes first.
"""

from __future__ import annotations

import numpy as np

from schedgen.ir.instructions import B, W
from schedgen.planner.order_search.problem import OrderProblem
from schedgen.planner.order_search.run_order import Run, begin_run, end_job, new_run
from schedgen.util.arrays import Numbers, Times
from schedgen.util.jit import kernel

TARGETS = 9  # target windows, evenly spaced from the bound to the order's own


def with_late_weights(problem: OrderProblem, order: Numbers, bound: float, value: float) -> list[Numbers]:
    """Orders for target windows from a lower bound to the order's own `value`; none if backwards are whole or the order
    cannot run."""
    node, mb = np.divmod(problem.class_jobs[problem.class_first[:-1]], problem.microbatches)
    direction, routes = node // problem.stages, problem.route.max() + 1
    if not (direction == W).any() or not np.isfinite(value):
        return []
    workers = np.repeat(np.arange(len(problem.row) - 1), np.diff(problem.worker_class))
    key = (workers * 3 * problem.stages + node) * routes + problem.route[mb]  # classes are sorted by it
    weight = np.where(direction == B, np.searchsorted(key, key + problem.stages * routes), -1)
    kept = direction[order] != W
    row = np.concatenate([[0], np.cumsum(kept)])[problem.row]
    busy = np.bincount(problem.worker, problem.length, len(row) - 1)
    run, orders = new_run(problem), []
    for target in np.linspace(bound, value, TARGETS):
        late, queue = np.zeros_like(order), np.zeros_like(order)
        place = place_weights.sized(len(order))
        if place(problem, order[kept], row, weight, target - busy, np.zeros((3, len(busy)), np.int64), queue,
                 np.zeros(len(busy)), run, late):  # fmt: skip
            orders.append(late)
    return orders


@kernel
def place_weights(
    problem: OrderProblem, order: Numbers, row: Numbers, weight: Numbers, slack: Times, at: Numbers, queue: Numbers,
    held: Times, run: Run, late: Numbers,
) -> bool:  # fmt: skip
    """Write an order with all W into `late`; return False if it cannot be completed.

    order, row      F and I of all workers, as classes; worker w's are order[row[w] : row[w + 1]]
    weight          by class of I: the class of its W
    slack           by worker: how long it may idle in all
    at, queue, held  zeros, working arrays: (3, workers), by place, by worker
    """
    capacity, workers = problem.capacity * (1 + 1e-12), len(row) - 1
    class_jobs, class_first, takes, length = problem.class_jobs, problem.class_first, problem.takes, problem.length
    batches, first, after, hop, worker = problem.microbatches, problem.first, problem.after, problem.hop, problem.worker
    ready, waits, stack, stacked = run.ready, run.waits, run.stack, run.stacked
    clock, end = run.clock, run.at  # `end`: the next place in `late`
    place, oldest, last = at[0], at[1], at[2]  # the next of F and I; the W jobs that wait in the queue
    top, placed = begin_run(problem, run), 0
    for w in range(workers):
        place[w], oldest[w], last[w] = row[w], problem.row[w], problem.row[w]
    while top:
        top -= 1
        w = stack[top]
        stacked[w] = False
        while True:
            c, job = -1, -1
            if place[w] < row[w + 1]:
                c = order[place[w]]
                job = class_jobs[class_first[c] + run.begun[c]]
                if waits[job] > 0:
                    break
            elif oldest[w] == last[w]:
                break
            if oldest[w] < last[w]:
                v = queue[oldest[w]]
                wait = ready[job] - clock[w] if c >= 0 else np.inf
                is_full = c >= 0 and takes[c] > 0 and held[w] + takes[c] > capacity[w]
                time = length[class_jobs[class_first[v] + run.begun[v]]]
                if is_full or (wait > 0 and (wait >= time * (1 - 1e-9) or wait > slack[w])):
                    c, job = v, class_jobs[class_first[v] + run.begun[v]]
                    oldest[w] += 1
            if takes[c] > 0 and held[w] + takes[c] > capacity[w]:
                return False
            start = max(clock[w], ready[job])
            if end[w] > problem.row[w] or not problem.own_window:
                slack[w] -= start - clock[w]
            clock[w] = start + length[job]
            held[w] += takes[c]
            late[end[w]] = c
            end[w] += 1
            placed += 1
            run.begun[c] += 1
            if job // batches < 2 * problem.stages:
                place[w] += 1
            if weight[c] >= 0:
                queue[last[w]] = weight[c]
                last[w] += 1
            top = end_job(job, w, clock[w], batches, first, after, hop, worker, ready, waits, stack, stacked, top)
    return placed == len(late)
