"""Dependencies between jobs: as arrays for the loops that order jobs, and in words for jobs that never start."""

from __future__ import annotations

import numpy as np

from schedgen.ir.job_graph import JobGraph
from schedgen.util.arrays import Ints, Numbers, Times
from schedgen.util.jit import kernel

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
