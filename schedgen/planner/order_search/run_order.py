"""Start times of an order's jobs, each as early as possible: the kernel that evaluates all candidates of the search."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from schedgen.ir.job_graph import may_start
from schedgen.planner.order_search.problem import OrderProblem
from schedgen.util.arrays import Flags, Numbers, Times
from schedgen.util.jit import kernel


class Run(NamedTuple):
    """The result of running an order, and working arrays; a Run is reused."""

    start: Times  # by job
    job: Numbers  # by place in the order: the job there
    window: Times  # by worker: from its first job, or from time 0, to the end of its last
    ready: Times  # by job: when it can start, given the jobs that have run so far
    waits: Numbers  # by job: how many jobs it still waits for
    begun: Numbers  # by class: jobs begun
    at: Numbers  # by worker: its next place
    clock: Times  # by worker
    stack: Numbers  # workers that may be able to continue
    stacked: Flags  # by worker: whether it is on the stack


def new_run(problem: OrderProblem) -> Run:
    """The arrays for a problem."""
    jobs, workers = len(problem.worker), len(problem.row) - 1
    return Run(
        start=np.zeros(jobs),
        job=np.zeros(jobs, np.int64),
        window=np.zeros(workers),
        ready=np.zeros(jobs),
        waits=np.zeros(jobs, np.int64),
        begun=np.zeros(len(problem.takes), np.int64),
        at=np.zeros(workers, np.int64),
        clock=np.zeros(workers),
        stack=np.zeros(workers + 1, np.int64),
        stacked=np.zeros(workers, np.bool_),
    )


@kernel
def begin_run(problem: OrderProblem, run: Run) -> int:
    """Reset: no job has run, and all workers are on the stack; return its size.

    Written as loops: for a copy of a whole array, `a[:] = b`, numba spends seconds compiling an error message.
    """
    for job in range(len(run.waits)):
        run.waits[job], run.ready[job] = problem.waits[job], 0.0
    for c in range(len(run.begun)):
        run.begun[c] = 0
    workers = len(run.at)
    for w in range(workers):
        run.at[w], run.clock[w] = problem.row[w], 0.0
        run.stack[w], run.stacked[w] = workers - 1 - w, True
    return workers


@kernel
def run_order(problem: OrderProblem, order: Numbers, limit: float, run: Run) -> float:
    """Run an order and return its longest window; infinity if that is above `limit`, or if the jobs deadlock."""
    batches, worker, length = problem.microbatches, problem.worker, problem.length
    first, after, hop, row = problem.first, problem.after, problem.hop, problem.row
    class_jobs, class_first = problem.class_jobs, problem.class_first
    start, place_job, ready, waits, count = run.start, run.job, run.ready, run.waits, run.begun
    at, clock, stack, stacked = run.at, run.clock, run.stack, run.stacked
    top, done, longest = begin_run(problem, run), 0, 0.0
    while top:
        top -= 1
        w = stack[top]
        stacked[w] = False
        place, time = at[w], clock[w]
        while place < row[w + 1]:
            c = order[place]
            job = class_jobs[class_first[c] + count[c]]
            if waits[job] > 0:
                break
            count[c] += 1
            time = max(time, ready[job])
            start[job] = time
            place_job[place] = job
            time += length[job]
            place += 1
            done += 1
            node = job // batches
            for k in range(first[node], first[node + 1]):
                waiting = after[k] * batches + job - node * batches
                v = worker[waiting]
                arrival = time if v == w else time + hop[k]
                if may_start(waiting, arrival, ready, waits) and v != w and not stacked[v]:
                    stack[top] = v
                    stacked[v] = True
                    top += 1
        at[w], clock[w] = place, time
        if place > row[w]:
            run.window[w] = time - start[place_job[row[w]]] if problem.own_window else time
            longest = max(longest, run.window[w])
            if longest > limit:
                return inf
    return longest if done == len(order) else inf


def run_and_judge(problem: OrderProblem, order: Numbers, run: Run) -> float:
    """Run an order and return its longest window, plus a tenth of the mean of all windows."""
    value: float = run_order.sized(len(order))(problem, order, np.inf, run)
    return value + 0.1 * float(run.window.mean())
