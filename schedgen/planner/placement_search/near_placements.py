"""`NearPlacements`: placements changed a little, judged by their bounds first and then by a cheap search for an order.

A change swaps two stages of different workers, or moves a stage to another worker. The way from a placement leads to
the first change that is judged better, those with the least bound first; a bound that is no better ends it. From the
best end, some changes at random begin another way. Work is counted, not seconds; draws are the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from schedgen.planner.placement_search.families import in_order
from schedgen.planner.placement_search.stage_sets import Placement, StageSets

Estimate = Callable[[Placement, float], tuple[float, float]]  # of a placement with a bound: what it may take, and work
KICKS = 200  # ways that begin with changes at random, at the most
CHANGES = (2, 4)  # of these, so many


class Judged(NamedTuple):
    """What is known of a placement; the less the better."""

    value: float  # what the best order of a cheap search takes
    bound: float
    placement: Placement


class NearPlacements:
    """The placements that were judged, and the work that is left."""

    def __init__(self, sets: StageSets, estimate: Estimate, workers: int, work: float) -> None:
        """`work`: millions of jobs that are given a time."""
        self.sets, self.estimate, self.workers, self.left = sets, estimate, workers, work
        self.judged: dict[Placement, Judged] = {}

    def search(self, starts: Iterable[Placement], floor: float) -> list[Judged]:
        """All placements that were judged, the best first; it ends where one takes no more than `floor`."""
        best = min(self._climb(self._judge(start)) for start in starts)
        rng = np.random.default_rng(0)
        for _ in range(KICKS):
            if self.left <= 0 or best.value <= floor * (1 + 1e-9):
                break
            placement = best.placement
            for _ in range(rng.integers(*CHANGES)):
                changed = sorted(self._changed(placement))
                placement = changed[rng.integers(len(changed))] if changed else placement
            best = min(best, self._climb(self._judge(placement)))
        return sorted(self.judged.values())

    def _climb(self, begin: Judged) -> Judged:
        """The end of a way, each step of which is judged better."""
        best: Judged | None = begin
        while best is not None:
            begin = best
            near = sorted((self.sets.of(other), other) for other in self._changed(begin.placement))
            worth = (other for bound, other in near if bound < begin.value * (1 - 1e-9) and self.left > 0)
            best = next((other for other in map(self._judge, worth) if other.value < begin.value * (1 - 1e-9)), None)
        return begin

    def _changed(self, placement: Placement) -> set[Placement]:
        """Those one change away, but for the names of workers."""
        return {_named(other) for other in _changes(placement, self.workers)} - {placement}

    def _judge(self, placement: Placement) -> Judged:
        if placement not in self.judged:
            bound = self.sets.of(placement)
            value, work = self.estimate(placement, bound)
            self.left -= work
            self.judged[placement] = Judged(value, bound, placement)
        return self.judged[placement]


def _changes(placement: Placement, workers: int) -> Iterator[Placement]:
    for s, worker in enumerate(placement):
        for other in range(min(workers, max(placement) + 2)):
            yield (*placement[:s], other, *placement[s + 1 :])
        for t in range(s):
            yield (*placement[:t], worker, *placement[t + 1 : s], placement[t], *placement[s + 1 :])


def _named(placement: Placement) -> Placement:
    return tuple(in_order(np.array(placement)).tolist())
