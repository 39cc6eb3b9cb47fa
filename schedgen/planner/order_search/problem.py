"""The problem that is searched: jobs with durations on workers, what they wait for, and the memory they take; and a
lower bound on the time of all orders.

Jobs are numbered as the compiler numbers them: job (d S + s) B + b is direction d of stage s on microbatch b.
Microbatches have the same route if, for each direction and stage, the same worker does their jobs. A class is a
direction and a stage of one route; its jobs run in the order of their microbatches. That loses nothing, since these
microbatches are alike: the k-th job of a class waits for the k-th of another. So an order is a sequence of classes for
each worker, and the sequences of all workers are concatenated in one array.

A message takes the same time whatever else is in flight, and none if it has no bytes. The simulator, where a rank has
one link in and one out, judges what is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.options import Options
from schedgen.compiler.place import PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.cost import Amount, by_stage
from schedgen.ir.instructions import B, F
from schedgen.ir.job_graph import wait_arrays
from schedgen.planner.order_search.question import Question
from schedgen.schemes.scheme import Scheme
from schedgen.simulator.lower_bounds import order_bound
from schedgen.simulator.machine import Machine
from schedgen.util.arrays import Numbers, Times


class OrderProblem(NamedTuple):
    """Arrays by job, by class or by node (direction and stage); times in the unit of the costs."""

    stages: int
    microbatches: int
    route: Numbers  # by microbatch
    worker: Numbers  # by job
    length: Times  # by job
    waits: Numbers  # by job: how many jobs it waits for
    first: Numbers  # the nodes that wait for node k: after[first[k] : first[k + 1]], each `hop` later on another worker
    after: Numbers
    hop: Times
    before_first: Numbers  # the same in reverse: the nodes that node k waits for
    before: Numbers
    before_hop: Times
    class_jobs: Numbers  # class_jobs[class_first[c] : class_first[c + 1]]: the jobs of class c by microbatch
    class_first: Numbers
    worker_class: Numbers  # classes worker_class[w] to worker_class[w + 1] are those of worker w
    row: Numbers  # places row[w] to row[w + 1] of an order are those of worker w
    takes: Times  # by class: memory that a job takes; below 0 it frees some
    capacity: Times  # by worker: its memory
    own_window: bool  # a worker's time begins with its own first job, not with the first of all


def make_problem(
    placed: PlacedScheme,
    cost: Mapping[str, Amount],
    machine: Machine,
    takes: tuple[Amount, ...],
    capacity: Amount,
    own_window: bool,
) -> OrderProblem:
    """The problem of a refined scheme.

    cost      the duration of each direction, for all stages or by stage
    takes     memory that a job of each direction takes when it begins, or frees (below 0) when it ends
    capacity  memory of all workers, or of each
    """
    directions, stages, batches = placed.compute.shape
    jobs = placed.job_graph
    worker = placed.compute.ravel().astype(np.int64)
    length = np.repeat(np.concatenate([by_stage(amount, stages) for amount in cost.values()]), batches)
    node, mb = np.divmod(np.arange(len(worker)), batches)
    ways, route = np.unique(placed.compute.reshape(-1, batches), axis=1, return_inverse=True)
    routes, nodes = ways.shape[1], directions * stages
    keys, class_of = np.unique((worker * nodes + node) * routes + route.ravel()[mb], return_inverse=True)
    class_jobs = np.argsort(class_of, kind="stable")
    class_first = np.searchsorted(class_of[class_jobs], np.arange(len(keys) + 1))
    class_node = keys // routes % nodes
    sizes = machine.edge_bytes(placed.graph)
    times = np.where(sizes > 0, machine.alpha + machine.beta * sizes, 0.0).tolist()
    # By edge: the time of its x or its g, as in `simulate`.
    message: dict[tuple[int, int], float] = dict(zip(placed.graph.edges, times, strict=True))

    def hop(node: int, other: int) -> float:
        """The time from a node to one that waits for it: forwards send their x, and I the g of the stage before."""
        (d, stage), other_stage = divmod(node, stages), other % stages
        if d != other // stages or d > B:
            return 0.0
        return message[(stage, other_stage) if d == F else (other_stage, stage)]

    waits, first, after = wait_arrays(jobs)
    back = [(node, other) for node, others in enumerate(jobs.pred) for other in others]
    amounts = np.array([by_stage(amount, stages) for amount in takes]).ravel()
    return OrderProblem(
        stages=stages,
        microbatches=batches,
        route=route.ravel(),
        worker=worker,
        length=length,
        waits=waits,
        first=first,
        after=after,
        hop=np.array([hop(node, other) for node, others in enumerate(jobs.succ) for other in others]),
        before_first=np.cumsum([0, *map(len, jobs.pred)]),
        before=np.array([other for _, other in back], np.int64),
        before_hop=np.array([hop(other, node) for node, other in back]),
        class_jobs=class_jobs,
        class_first=class_first,
        worker_class=np.searchsorted(keys // (nodes * routes), np.arange(placed.workers + 1)),
        row=np.searchsorted(np.sort(worker), np.arange(placed.workers + 1)),
        takes=amounts[class_node],
        capacity=by_stage(capacity, placed.workers).astype(np.float64),
        own_window=own_window,
    )


def class_nodes(problem: OrderProblem) -> Numbers:
    """By class: its node."""
    return problem.class_jobs[problem.class_first[:-1]] // problem.microbatches


def order_of(problem: OrderProblem, start: NDArray[Any]) -> Numbers:
    """The order in which these jobs run; `start`: by job, any number that grows with time on a worker."""
    class_of = np.empty(len(problem.worker), np.int64)
    class_of[problem.class_jobs] = np.repeat(np.arange(len(problem.takes)), np.diff(problem.class_first))
    return class_of[np.lexsort((start, problem.worker))]


def serial_order(problem: OrderProblem) -> Numbers:
    """The order of one microbatch after another, each W directly behind its I: what holds least."""
    node, microbatch = np.divmod(np.arange(len(problem.worker)), problem.microbatches)
    d, s = np.divmod(node, problem.stages)
    return order_of(problem, 6 * problem.stages * microbatch + np.where(d == F, s, 3 * problem.stages - 2 * s + d))


def places(problem: OrderProblem, order: Numbers) -> Numbers:
    """The place of every job in an order, as a strict n."""
    n = np.empty(len(order), np.int64)
    n[problem.class_jobs] = np.argsort(order, kind="stable")
    return n


def fits(problem: OrderProblem, order: Numbers) -> bool:
    """Whether no worker holds more than its memory."""
    return bool((most_held(problem, order) <= problem.capacity * (1 + 1e-12)).all())


def most_held(problem: OrderProblem, order: Numbers) -> Times:
    """By worker: the most memory that its jobs hold at once."""
    takes = problem.takes[order]
    workers = range(len(problem.row) - 1)
    return np.array([np.cumsum(takes[problem.row[w] : problem.row[w + 1]]).max(initial=0) for w in workers])


def as_placement(scheme: Scheme, split: bool) -> Scheme:
    """The scheme without its order, with split backwards if `split`; halves of a whole backward have its worker."""
    w = scheme.w

    @wraps(w)  # which also tells a fourth argument
    def halves(s: Any, b: Any, d: Any, *part: Any) -> Any:
        return w(s, b, np.minimum(d, B), *part)

    return scheme._replace(
        w=w if scheme.split or not split else halves,
        n=lambda s, b, d: 0 * (s + b + d),
        mode="greedy",
        split=split,
        unsplit_backward=None,
        delayed_send=None,
        cap=None,
    )


def placed_jobs(question: Question) -> PlacedScheme:
    """The jobs on their workers; backwards are in halves if the costs have I."""
    return refine(place(as_placement(question.scheme, "I" in question.cost), question.sizes, Options()))


def lenient(question: Question) -> Question:
    """The question for bounds, without positive `half`: the whole backwards of a built-in scheme never hold it."""
    return question._replace(machine=question.machine._replace(half=np.minimum(question.machine.half, 0)))


def problem_of(placed: PlacedScheme, question: Question) -> OrderProblem:
    """The problem of these jobs; memory is in saved forwards, or in bytes."""
    limits, (inputs, saved, half) = question.limits, kept_by_stage(placed, question)
    held = saved + inputs
    takes: tuple[Times, ...] = (held, half, -held - half) if placed.scheme.split else (held, -held)
    capacity = limits.saved if limits.bytes is None else limits.bytes
    if capacity is None or np.isinf(capacity):
        takes, capacity = (np.zeros(len(held)),) * len(takes), 1.0
    return make_problem(placed, question.cost, question.machine, takes, capacity, limits.objective == "window")


def kept_by_stage(placed: PlacedScheme, question: Question) -> tuple[Times, Times, Times]:
    """By stage, what a forward receives, which its backward also reads; what it saves; and what a BWD_I keeps besides.

    In bytes; without a limit in bytes, 1 for what a forward saves and 0 for the rest. An input that several stages
    read is left out: two of them may be on one worker, which then holds it once.
    """
    stages, machine = placed.compute.shape[1], question.machine
    inputs = np.zeros(stages)
    if question.limits.bytes is None:
        return inputs, np.ones(stages), np.zeros(stages)
    activation = by_stage(machine.activation, stages)
    for producer, consumer in placed.graph.edges:
        if len(placed.graph.consumers[producer]) == 1:
            inputs[consumer] += activation[producer]
    return inputs, by_stage(machine.saved, stages), by_stage(machine.half, stages)


def lower_bound(problem: OrderProblem, placed: PlacedScheme) -> float:
    """A lower bound on the time of any order."""
    directions, stages, batches = placed.compute.shape
    worker = placed.compute.reshape(-1, batches)
    hops = {}  # by pair of nodes that are always on different workers
    for node in range(directions * stages):
        for k in range(problem.before_first[node], problem.before_first[node + 1]):
            other = int(problem.before[k])
            if (worker[node] != worker[other]).all():
                hops[other, node] = float(problem.before_hop[k])
    takes = np.zeros(directions * stages)
    takes[class_nodes(problem)] = problem.takes
    before, lengths = placed.job_graph.pred, problem.length[::batches]
    return order_bound(before, placed.compute, lengths, hops, problem.own_window, takes, problem.capacity)


def least_time(question: Question) -> float:
    """A lower bound on the time of any order, by `order_bound` alone."""
    placed = placed_jobs(question)
    return lower_bound(problem_of(placed, lenient(question)), placed)
