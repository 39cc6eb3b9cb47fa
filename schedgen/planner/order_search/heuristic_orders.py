"""`heuristic_orders`: the best orders of a problem, by random rules and then simulated annealing.

The W jobs of every order that is kept are also placed anew: in gaps, and no sooner than necessary. A W goes into a gap
that is long enough. At a shorter gap the worker waits if its window can still end by a target, that is, if the time
left after the wait is no less than the duration of its remaining jobs. Otherwise a W goes first, and the jobs after it
are delayed. So W jobs are kept for the end, where backwards are rare, and every worker waits about equally long. The
greedy search for ZB-V does the same with the largest idle time so far in place of a target [Qi et al. 2023, "Zero
bubble pipeline parallelism", section 6]. If memory is full, the oldest W goes first.

Annealing moves a job to another place of its worker's sequence. Most moves are of jobs on the critical path of the
worker with the longest window, since others cannot shorten it. Orders are compared by the longest window plus the mean
of all windows: of two orders with the same longest window, the one with the smaller mean is nearer to a shorter one.
"""

from __future__ import annotations

import numpy as np

from schedgen.ir.instructions import B, W
from schedgen.ir.job_graph import may_start
from schedgen.planner.order_search.priority_rules import find_rules
from schedgen.planner.order_search.problem import OrderProblem, class_nodes, fits, serial_order
from schedgen.planner.order_search.question import reached
from schedgen.planner.order_search.run_order import Run, begin_run, new_run, run_and_judge, run_order
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


BEST = 4  # orders that are returned
RULE_JOBS = 4  # a rule takes this many times as long as `run_order` for each job
RULES = (100, 6000)  # that are tried, at least and at the most
FEWEST_MOVES = 1000  # of one annealing
LEAST_MOVES = 20_000  # with fewer moves in all annealing finds nothing: the work is left to rules
CRITICAL = 90  # percent of moves that begin on the critical path
REACH = 8  # places that a job moves at the most
HOT = (0.03, 0.3, 2.0)  # temperatures at the first move, in mean durations of a job


def heuristic_orders(
    problem: OrderProblem, begin: list[Numbers], bound: float, budget: int, turn: int = 0
) -> tuple[list[Numbers], int]:
    """The best orders, empty if none keeps to the memory, and the work they took, in job start times computed.

    The search starts from the orders of `begin` and ends when `bound` is reached, or after about `budget`. Each `turn`
    draws different random numbers.
    """
    search = _Search(problem, bound, budget)
    for order in begin:
        search.add(order)
    if search.is_done:
        return search.best(), budget - search.left
    anneals = budget // search.jobs >= LEAST_MOVES
    rounds = budget // ((4 if anneals else 1) * RULE_JOBS * search.jobs)
    rounds = max(RULES[0], min(RULES[1], rounds))
    for order in find_rules(problem, rounds, turn, search.run):
        search.add(order)
    search.left -= rounds * RULE_JOBS * search.jobs
    if not search.found:  # as where routes cross: each worker waits for the memory of another
        search.add(serial_order(problem))
    if not search.found:
        return [], budget - search.left
    seed = 1000 * turn
    for order in [order for _, _, order in search.found[:3]] if anneals else []:
        for hot in HOT:
            if not search.is_done:
                search.anneal(order, hot, 0.06, seed := seed + 1)
    for share in (0.3, 0.4, 0.5, 1.0) if anneals else ():
        if not search.is_done:
            search.anneal(search.found[0][2], HOT[seed % 3], share, seed := seed + 1)
    return search.best(), budget - search.left


class _Search:
    """The best orders so far, and the work that is left."""

    def __init__(self, problem: OrderProblem, bound: float, budget: int) -> None:
        self.problem, self.bound, self.left = problem, bound, budget
        self.run, self.trial = new_run(problem), new_run(problem)
        self.jobs = len(problem.worker)
        self.found: list[tuple[float, float, Numbers]] = []  # what `run_and_judge` returns, longest window, order

    def add(self, order: Numbers) -> None:
        """Keep an order, if it can run and fits, and its variants with W jobs placed anew."""
        self._keep(order)
        late = with_late_weights(self.problem, order, self.bound, float(self.run.window.max()))
        self.left -= len(late) * self.jobs * (1 + RULE_JOBS)
        for each in late:
            self._keep(each)

    def _keep(self, order: Numbers) -> None:
        value = run_and_judge(self.problem, order, self.run)
        if np.isfinite(value) and fits(self.problem, order) and all(value != known for known, _, _ in self.found):
            self.found.append((value, float(self.run.window.max()), order))
            self.found.sort(key=lambda entry: entry[0])

    def best(self) -> list[Numbers]:
        """The orders with the shortest longest windows, the best first."""
        return [order for _, _, order in sorted(self.found, key=lambda entry: entry[1])[:BEST]]

    def anneal(self, order: Numbers, hot: float, share: float, seed: int) -> None:
        """Anneal an order with a share of the work that is left."""
        moves, mean = max(FEWEST_MOVES, int(share * self.left / self.jobs)), float(self.problem.length.mean())
        _, better, judged = anneal.sized(self.jobs)(
            self.problem, order.copy(), seed, moves, hot * mean, 0.3 * min(hot, 0.1) * mean, self.bound, self.run,
            self.trial,
        )  # fmt: skip
        self.left -= judged * self.jobs
        self.add(better)

    @property
    def is_done(self) -> bool:
        """Whether the bound is reached."""
        return any(reached(window, self.bound) for _, window, _ in self.found)


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
