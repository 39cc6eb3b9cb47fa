"""The order problem of a placed scheme, and a lower bound for all its orders."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.place import PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.cost import by_stage
from schedgen.ir.instructions import B
from schedgen.planner.order_search.problem import OrderProblem, class_nodes, make_problem
from schedgen.planner.order_search.question import Question
from schedgen.schemes.scheme import Scheme
from schedgen.simulator.lower_bounds import order_bound
from schedgen.util.arrays import Times


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
