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
from schedgen.ir.job_graph import may_start
from schedgen.planner.order_search.problem import OrderProblem, class_nodes
from schedgen.planner.order_search.run_order import Run, begin_run, new_run
from schedgen.util.arrays import Numbers, Times
from schedgen.util.jit import kernel

TARGETS = 9  # target windows, evenly spaced from the bound to the order's own


def with_late_weights(problem: OrderProblem, order: Numbers, bound: float, value: float) -> list[Numbers]:
    """Orders for target windows from a lower bound to the order's own `value`; none if backwards are whole or the order
    cannot run."""
    direction = class_nodes(problem) // problem.stages
    if not (direction == W).any() or not np.isfinite(value):
        return []
    kept = direction[order] != W
    row = np.concatenate([[0], np.cumsum(kept)])[problem.row]
    busy = np.bincount(problem.worker, problem.length, len(row) - 1)
    run, orders, place = new_run(problem), [], place_weights.sized(len(order))
    for target in np.linspace(bound, value, TARGETS):
        late = np.zeros_like(order)
        if place(problem, order[kept], row, target - busy, run, late):
            orders.append(late)
    return orders


@kernel
def place_weights(problem: OrderProblem, order: Numbers, row: Numbers, slack: Times, run: Run, late: Numbers) -> bool:
    """Write an order with all W into `late`; return False if it cannot be completed.

    order, row  F and I of all workers, as classes; worker w's are order[row[w] : row[w + 1]]
    slack       by worker: how long it may idle in all; changed
    """
    capacity, batches, worker, length = (
        problem.capacity * (1 + 1e-12),
        problem.microbatches,
        problem.worker,
        problem.length,
    )
    first, after, hop, takes = problem.first, problem.after, problem.hop, problem.takes
    class_jobs, class_first, worker_class = problem.class_jobs, problem.class_first, problem.worker_class
    ready, waits, count, clock, stack, stacked = run.ready, run.waits, run.begun, run.clock, run.stack, run.stacked
    end = run.at  # the next place in `late`
    place, queue, held = row.copy(), np.zeros_like(late), np.zeros(len(capacity))  # `place`: the next of F and I
    oldest, last = problem.row.copy(), problem.row.copy()  # the W jobs that wait in the queue
    top, placed = begin_run(problem, run), 0
    while top:
        top -= 1
        w = stack[top]
        stacked[w] = False
        while True:
            c, job = -1, -1
            if place[w] < row[w + 1]:
                c = order[place[w]]
                job = class_jobs[class_first[c] + count[c]]
                if waits[job] > 0:
                    break
            elif oldest[w] == last[w]:
                break
            if oldest[w] < last[w]:
                v = queue[oldest[w]]
                weight = class_jobs[class_first[v] + count[v]]
                wait = ready[job] - clock[w] if c >= 0 else np.inf
                is_full = c >= 0 and takes[c] > 0 and held[w] + takes[c] > capacity[w]
                if is_full or (wait > 0 and (wait >= length[weight] * (1 - 1e-9) or wait > slack[w])):
                    c, job = v, weight
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
            count[c] += 1
            node = job // batches
            if node < 2 * problem.stages:
                place[w] += 1
            if node // problem.stages == B:  # a worker has as many classes of W, in the same order
                queue[last[w]] = c + (worker_class[w + 1] - worker_class[w]) // 3
                last[w] += 1
            for k in range(first[node], first[node + 1]):
                waiting = after[k] * batches + job - node * batches
                u = worker[waiting]
                arrival = clock[w] if u == w else clock[w] + hop[k]
                if may_start(waiting, arrival, ready, waits) and u != w and not stacked[u]:
                    stack[top], stacked[u] = u, True
                    top += 1
    return placed == len(late)
