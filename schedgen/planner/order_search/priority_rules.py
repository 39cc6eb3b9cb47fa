"""List scheduling: every worker takes the job that could start earliest, with a handicap by class.

With no handicaps this is the work-conserving greedy. A handicap of W sets how long a gap may be before a W fills it, a
handicap of F against I how far a worker runs ahead; limits hold back the forwards of a class before the memory is full.
Until a worker's first I its forwards have a patience instead: there is no W yet to fill the gap before that I, and the
patience decides whether the worker waits or runs one more F, which delays all workers before it. This covers the
heuristics of Qi et al. 2023 ("Zero bubble pipeline parallelism", section 3.1). `find_rules` tries random rules, and
random changes of the best.
"""

from __future__ import annotations

import numpy as np

from schedgen.ir.instructions import F
from schedgen.ir.job_graph import may_start
from schedgen.planner.order_search.problem import OrderProblem, class_nodes
from schedgen.planner.order_search.run_order import Run, begin_run
from schedgen.util.arrays import Numbers, Times
from schedgen.util.jit import kernel


@kernel
def list_schedule(
    problem: OrderProblem, patience: Times, handicap: Times, limit: Times, run: Run, order: Numbers
) -> float:
    """Write the order into `order` and return its longest window, as `run_order`; infinity if memory blocks it.

    patience, handicap  times by class, before a worker's first backward job and from it on
    limit               memory by class
    """
    batches, worker, length = problem.microbatches, problem.worker, problem.length
    first, after, hop, row, takes = problem.first, problem.after, problem.hop, problem.row, problem.takes
    class_jobs, class_first, worker_class = problem.class_jobs, problem.class_first, problem.worker_class
    ready, waits, count, at, clock = run.ready, run.waits, run.begun, run.at, run.clock
    stack, stacked, workers = run.stack, run.stacked, len(row) - 1
    held, begin, opened = np.zeros(workers), np.zeros(workers), np.zeros(workers)
    choice, turned = np.full(workers, -1), np.zeros(workers, np.bool_)
    top = begin_run(problem, run)
    for _ in range(len(order)):
        while top:  # workers that must choose anew
            top -= 1
            w = stack[top]
            stacked[w] = False
            choice[w], least = -1, np.inf
            for c in range(worker_class[w], worker_class[w + 1]):
                k = class_first[c] + count[c]
                if k == class_first[c + 1] or waits[class_jobs[k]] > 0:
                    continue
                if takes[c] > 0 and held[w] + takes[c] > limit[c]:
                    continue
                time = max(clock[w], ready[class_jobs[k]])
                behind = time + (handicap[c] if turned[w] else patience[c])
                if behind < least:
                    least = behind
                    choice[w], begin[w] = c, time
        v = -1  # the worker whose choice begins first
        for w in range(workers):
            if choice[w] >= 0 and (v < 0 or begin[w] < begin[v]):
                v = w
        if v < 0:
            return np.inf
        c = choice[v]
        job = class_jobs[class_first[c] + count[c]]
        count[c] += 1
        if at[v] == row[v]:
            opened[v] = begin[v]
        order[at[v]] = c
        at[v] += 1
        held[v] += takes[c]
        clock[v] = begin[v] + length[job]
        turned[v] |= job // batches >= problem.stages
        stack[0], stacked[v], top = v, True, 1
        node = job // batches
        for k in range(first[node], first[node + 1]):
            waiting = after[k] * batches + job - node * batches
            u = worker[waiting]
            arrival = clock[v] if u == v else clock[v] + hop[k]
            if may_start(waiting, arrival, ready, waits) and not stacked[u]:
                stack[top], stacked[u] = u, True
                top += 1
    longest = 0.0
    for w in range(workers):
        if row[w] < row[w + 1]:
            run.window[w] = clock[w] - opened[w] if problem.own_window else clock[w]
            longest = max(longest, run.window[w])
    return longest


ALIKE = 0.5  # share of the random rules whose forwards have the same handicap from the beginning
KEPT = 8  # how many of the best rules are changed further
STEPS = (0.02, 0.1, 0.3)  # standard deviations of a change

# (3, 2, columns), linear along the workers: patience and handicap, in mean durations of a job, and limit, as a fraction
# of the capacity; at the first and at the last worker; for each direction and chunk of a worker.
Rules = Times


def find_rules(problem: OrderProblem, rounds: int, seed: int, run: Run) -> list[Numbers]:
    """The best orders of rules by the longest window plus a tenth of the mean of all windows, the best first."""
    rng = np.random.default_rng(seed)
    column, direction, along = _columns(problem)
    ends = np.array([1 - along, along])
    capacity = np.repeat(problem.capacity, np.diff(problem.worker_class))
    mean = float(problem.length.mean())
    best: list[tuple[float, Rules, Numbers]] = []
    make = list_schedule.sized(len(problem.worker))
    for k in range(rounds):
        if 3 * k < rounds or not best:
            rules = _random_rules(rng, direction)
        else:
            rules = _changed(rng, best[int(rng.integers(len(best)))][1])
        parts = rules.take(column, axis=2) * ends
        patience, handicap, part = parts[:, 0] + parts[:, 1]
        limit = capacity * (np.minimum(np.maximum(part, 0), 1) + 1e-12)
        order = np.zeros(len(problem.worker), np.int64)
        longest = make(problem, mean * patience, mean * handicap, limit, run, order)
        if not np.isfinite(longest):
            continue
        value = longest + 0.1 * float(run.window.mean())
        if (len(best) < KEPT or value < best[-1][0]) and all(value != other for other, _, _ in best):
            best = sorted([*best, (value, rules, order)], key=lambda entry: entry[0])[:KEPT]
    return [order for _, _, order in best]


def _columns(problem: OrderProblem) -> tuple[Numbers, Numbers, Times]:
    """By class its column, by column its direction, and by class the position of its worker, from 0 to 1."""
    workers = len(problem.row) - 1
    worker = np.repeat(np.arange(workers), np.diff(problem.worker_class))
    direction = class_nodes(problem) // problem.stages
    group = worker * 3 + direction
    chunk = np.arange(len(group)) - np.searchsorted(group, group)  # classes of a worker are sorted by direction
    keys, column = np.unique(direction * len(group) + chunk, return_inverse=True)
    return column, keys // len(group), worker / max(1, workers - 1)


def _random_rules(rng: np.random.Generator, direction: Numbers) -> Rules:
    """Random rules: forwards up to a job before or after I, gaps up to 1.5 jobs, limits from half the memory to all."""
    low, high, is_forward = np.array([-1.0, -0.3, 0.0])[direction], np.array([1.0, 0.3, 1.5])[direction], direction == F
    rules: Rules = np.empty((3, 2, len(direction)))
    patience, handicap, limit = rules
    handicap[:] = low + (high - low) * rng.random(handicap.shape)
    patience[:] = is_forward * rng.random(len(direction))
    if rng.random() < ALIKE:
        patience[:] = handicap
    limit[:] = np.where(is_forward, rng.uniform(0.5, 1.7, limit.shape), 1.0)
    return rules


def _changed(rng: np.random.Generator, rules: Rules) -> Rules:
    changed = rules.copy()
    for ends in changed:
        chosen = rng.random(ends.shape) < 0.4
        ends += chosen * rng.normal(0, STEPS[int(rng.integers(len(STEPS)))], ends.shape)
    return changed
