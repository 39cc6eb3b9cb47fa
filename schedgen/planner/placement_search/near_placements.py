"""`NearPlacements`: placements changed a little, judged by their bounds first and then by a cheap search for an order.

A change swaps two stages of different workers, or moves a stage to another worker. From a placement the search climbs
to the first change that is judged better; it tries changes with the least bounds first, and none whose bound is no
better. From the best placement reached, a few random changes begin another climb. Work is counted, not seconds; the
random numbers are the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from schedgen.planner.order_search.question import reached
from schedgen.planner.placement_search.families import in_order
from schedgen.planner.placement_search.stage_sets import Placement, StageSets
from schedgen.util.arrays import Times

AT_ONCE = 60  # placements whose bounds are computed, and sorted, at a time
KICKS = 200  # climbs that begin with random changes, at the most
CHANGES = (2, 4)  # random changes before such a climb: at least the first, fewer than the second


class Trial(NamedTuple):
    """An order of a placement by a cheap search; empty, with an infinite value, if none within the limits is found."""

    value: float  # its longest window
    start: Times  # by job
    work: float  # millions of job start times computed


class Judged(NamedTuple):
    """The results for a placement."""

    placement: Placement
    bound: float
    trial: Trial


class NearPlacements:
    """The placements that were judged, and the work that is left."""

    def __init__(
        self, sets: StageSets, estimate: Callable[[Placement, float, Times], Trial], workers: int, work: float
    ) -> None:
        """`estimate` takes a placement, its bound and job starts of a near one; `work`: millions of job start times."""
        self.sets, self.estimate, self.workers, self.left = sets, estimate, workers, work
        self.judged: dict[Placement, Judged] = {}

    def search(self, starts: Iterable[Placement], floor: float) -> list[Judged]:
        """All placements that were judged, the best first; the search ends when one takes no more than `floor`."""
        best = min((self._climb(self._judge(start)) for start in starts), key=_rank)
        rng = np.random.default_rng(0)
        for _ in range(KICKS):
            if self.left <= 0 or reached(best.trial.value, floor):
                break
            placement = best.placement
            for _ in range(rng.integers(*CHANGES)):
                changed = sorted(self._changed(placement))
                placement = changed[rng.integers(len(changed))] if changed else placement
            best = min(best, self._climb(self._judge(placement, best)), key=_rank)
        return sorted(self.judged.values(), key=_rank)

    def _climb(self, begin: Judged) -> Judged:
        """The end of a climb, each step of which is judged better."""
        better: Judged | None = begin
        while better is not None:
            begin, enough = better, better.trial.value * (1 - 1e-9)
            judged = (self._judge(other, begin) for other in self._worth(begin.placement, enough) if self.left > 0)
            better = next((each for each in judged if each.trial.value < enough), None)
        return begin

    def _worth(self, placement: Placement, enough: float) -> Iterator[Placement]:
        """Placements one change away that may take less than `enough`, those with the least bounds first."""
        near = sorted((self.sets.quick_bound(other), other) for other in self._changed(placement))
        near = [(quick, other) for quick, other in near if quick < enough]
        for k in range(0, len(near), AT_ONCE):
            bounds = sorted((self.sets.of(other), other) for _, other in near[k : k + AT_ONCE])
            yield from (other for bound, other in bounds if bound < enough)

    def _changed(self, placement: Placement) -> set[Placement]:
        """Placements one change away, up to the numbering of workers."""
        return {in_order(other) for other in _changes(placement, self.workers)} - {placement}

    def _judge(self, placement: Placement, near: Judged | None = None) -> Judged:
        if placement not in self.judged:
            bound = self.sets.of(placement)
            trial = self.estimate(placement, bound, near.trial.start if near else np.zeros(0))
            self.left -= trial.work
            self.judged[placement] = Judged(placement, bound, trial)
        return self.judged[placement]


def _rank(judged: Judged) -> tuple[float, float, Placement]:
    """A sort key: the less, the better."""
    return judged.trial.value, judged.bound, judged.placement


def _changes(placement: Placement, workers: int) -> Iterator[Placement]:
    for s, worker in enumerate(placement):
        for other in range(min(workers, max(placement) + 2)):
            yield (*placement[:s], other, *placement[s + 1 :])
        for t in range(s):
            yield (*placement[:t], worker, *placement[t + 1 : s], placement[t], *placement[s + 1 :])
