"""The job graph: what each job waits for, and what waits for it (pred and succ of Rahimi 2025).

A node is a direction and a stage; it stands for the jobs of all microbatches, whose edges are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from schedgen.ir.instructions import DIRECTIONS, B, F, W
from schedgen.ir.stage_graph import StageGraph


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
