"""The job graph: what each job waits for, and what waits for it (pred and succ of Rahimi 2025).

A node is a direction and a stage; it stands for the jobs of all microbatches, whose edges are alike. Loops that order
jobs get it as arrays, and `cycle` says in words which jobs never start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from schedgen.ir.instructions import DIRECTIONS, B, F, W
from schedgen.ir.stage_graph import StageGraph
from schedgen.util.arrays import Ints, Numbers, Times
from schedgen.util.jit import kernel


class JobGraph(NamedTuple):
    """Node d S + s is direction d of stage s, and job (d S + s) B + b its microbatch b."""

    directions: int
    stages: int
    microbatches: int
    pred: tuple[tuple[int, ...], ...]  # by node, the nodes it waits for
    succ: tuple[tuple[int, ...], ...]  # by node, the nodes that wait for it

    def job_name(self, job: int) -> str:
        """A job as users write it: F(s, b)."""
        node, b = divmod(job, self.microbatches)
        d, s = divmod(node, self.stages)
        return f"{DIRECTIONS[self.directions][d]}({s}, {b})"


def job_graph(
    stages: StageGraph,
    microbatches: int,
    directions: int,
    summed_stages: Callable[[int], Iterable[int]] = lambda stage: (stage,),
) -> JobGraph:
    """The jobs of a stage graph; a stage's output is complete once the jobs of all its `summed_stages` have run."""
    S = stages.stages
    pred: list[set[int]] = [set() for _ in range(directions * S)]
    for producer, consumer in stages.edges:
        pred[F * S + consumer].update(F * S + stage for stage in summed_stages(producer))
        if directions > 1:
            pred[B * S + producer].update(B * S + stage for stage in summed_stages(consumer))
    for s in range(S):
        if directions > 1:
            pred[B * S + s].add(F * S + s)
        if directions == 3:
            pred[W * S + s].add(B * S + s)
    succ: list[list[int]] = [[] for _ in pred]
    for node, nodes in enumerate(pred):
        for other in nodes:
            succ[other].append(node)
    return JobGraph(directions, S, microbatches, tuple(tuple(sorted(p)) for p in pred), tuple(map(tuple, succ)))


SHOWN = 8  # jobs of a cycle that a refusal names


def wait_arrays(graph: JobGraph) -> tuple[Numbers, Numbers, Numbers]:
    """(waits, first, after): how many jobs each job waits for; node k's successors, after[first[k] : first[k + 1]]."""
    waits = np.repeat(np.array([len(nodes) for nodes in graph.pred], np.int64), graph.microbatches)
    first = np.cumsum([0, *(len(nodes) for nodes in graph.succ)])
    return waits, first, np.array([node for nodes in graph.succ for node in nodes], np.int64)


@kernel
def may_start(job: int, time: float, ready: Times, waits: Numbers) -> bool:
    """A job gets at `time` one of the inputs that it waits for; return whether it was the last.

    ready, waits  by job: the time of its latest input so far, and how many it still waits for
    """
    ready[job] = max(ready[job], time)
    waits[job] -= 1
    return bool(waits[job] == 0)


def cycle(graph: JobGraph, worker: Ints, start: Times, previous: Numbers, sent: Numbers | None = None) -> str:
    """A cycle of jobs that wait for one another, in words, found from a job that never started.

    Of a long cycle it names the first jobs and the last one, which waits for the first.

    `previous`: by job, the job that its worker must run directly before it; -1: none.
    `sent`: by job, the job after which its output leaves; None: itself.
    """
    job = int(np.flatnonzero(start < 0)[0])
    path: dict[int, int] = {}
    words: list[str] = []
    while job not in path:
        path[job] = len(path)
        node, b = divmod(job, graph.microbatches)
        before = [p * graph.microbatches + b for p in graph.pred[node]]
        if sent is not None:
            before += [int(sent[producer]) for producer in before if worker[producer] != worker[job]]
        before.append(int(previous[job]))
        blocked = [other for other in before if other >= 0 and start[other] < 0]
        if not blocked:  # a limit holds it back: it waits for the backward of a microbatch in flight
            blocked = _in_flight(graph, worker, start, job)
        words.append(f"{graph.job_name(job)} on worker {worker[job]} waits for {graph.job_name(blocked[0])}")
        job = blocked[0]
    links = words[path[job] :]
    if len(links) > SHOWN:
        links[SHOWN - 1 :] = [f"{len(links) - SHOWN} more", f"and {links[-1]}"]
    return ", ".join(links)


def _in_flight(graph: JobGraph, worker: Ints, start: Times, job: int) -> list[int]:
    """The last backwards of the microbatches in flight on a blocked job's worker, those of the job's stage first."""
    forwards = graph.stages * graph.microbatches
    lasts = np.arange(forwards) + (graph.directions - 1) * forwards
    in_flight = np.flatnonzero((worker[:forwards] == worker[job]) & (start[:forwards] >= 0) & (start[lasts] < 0))
    same = in_flight // graph.microbatches == job // graph.microbatches
    return [int(lasts[forward]) for forward in [*in_flight[same], *in_flight[~same]]]
